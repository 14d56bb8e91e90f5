"""The base of all trainers of language models: rows, views of models, processes, settings."""
