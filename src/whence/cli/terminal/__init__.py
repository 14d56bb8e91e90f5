"""What the commands share: the terminal, options, progress, the run that is opened, and its moments."""

import lazy_loader

# What is imported is in __init__.pyi; it loads at first use, since the command's help needs no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
