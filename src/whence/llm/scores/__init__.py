"""Scores of responses: objectives, targets, rows, tokens."""
