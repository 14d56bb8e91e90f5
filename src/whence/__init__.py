"""whence: which records of a rollout made a policy act as it does, which helped or harmed its learning.

A positive influence means: training on the record raises the target.
"""

import lazy_loader

__version__ = "0.1.0"

# What is imported is in __init__.pyi; it loads at first use, since the command's help and lists need no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
