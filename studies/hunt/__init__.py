"""Planted faults of environments and settings: which are named by findings, and which by what one has already."""
