"""What a page says of a run: its rounds, the moments of a round, their causes, the records as a grid."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
