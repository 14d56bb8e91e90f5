"""Fault operators: one fault of a given size, planted into any public environment."""
