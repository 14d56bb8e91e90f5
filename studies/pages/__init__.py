"""The pictures of README and docs, of pages in a browser."""
