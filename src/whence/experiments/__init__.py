"""Training runs as data: presets, arms, comparisons and what they are measured by."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use, since lists and help need no training library.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
