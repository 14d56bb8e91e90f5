"""The base of all trainers of language models: rows, views of models, adapters, processes, settings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
