"""The detectors: what each looks at in a run of an agent."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use, since importing one module needs no others.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
