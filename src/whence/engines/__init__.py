"""Engines: they compute all per-record products with the gradients of one or several targets."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
