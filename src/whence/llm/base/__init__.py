"""What all trainers of language models read: rows, views of models, processes, settings."""
