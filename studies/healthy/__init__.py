"""Healthy runs of public environments: what a run looks like in which nothing was planted."""
