"""What every room rests on: errors, guards, records, views of policies, objectives and targets."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
