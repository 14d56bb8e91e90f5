"""Run directories: typed, versioned files of one training run, each written atomically, no pickles."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
