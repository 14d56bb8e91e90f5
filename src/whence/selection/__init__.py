"""Selection: the records of a round that train, and the rules that choose them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
