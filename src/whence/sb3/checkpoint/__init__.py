"""A training on disk: its rounds, checkpoints, and the model built again."""
