"""Rounds of SB3's models: collected, read as records, trained on selections, recorded and replayed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
