"""Environments in their wrappers, and their episodes: recorded, played again, evaluated, and brought back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
