"""Scores of records: how they are made, their errors, and the moments and groups that share them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
