"""Text: prompts, responses and rewards."""
