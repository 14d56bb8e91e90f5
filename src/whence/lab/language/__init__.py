"""Laboratories of language models: small models, problems, and runs of their training."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use, since the command's help needs no training library.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
