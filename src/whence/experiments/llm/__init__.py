"""Post-training runs of language models."""
