"""Audits: an environment is played before anything is trained in it."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
