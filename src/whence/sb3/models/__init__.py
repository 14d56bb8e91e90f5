"""SB3's models: described, built again, and read as tensors, sequences and names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
