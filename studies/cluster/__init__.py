"""A sweep over a Ray cluster whose nodes are killed."""
