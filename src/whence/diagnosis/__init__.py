"""Diagnosis: the reasons why records harm or help, and the causes of a policy's behaviour (LDA §4.1, §4.2)."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
