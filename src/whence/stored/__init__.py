"""Runs opened again."""

from whence.core.packages import attach_face

# What is imported is in __init__.pyi; it loads at first use.
__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
