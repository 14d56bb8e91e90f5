"""Which scores find the episodes that taught a planted habit."""
