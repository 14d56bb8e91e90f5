"""The laboratories' comparisons, and the papers' claims."""
