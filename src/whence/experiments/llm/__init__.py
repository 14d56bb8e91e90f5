"""Post-training runs of language models, as experiments."""
