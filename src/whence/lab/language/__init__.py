"""Laboratories of language models: small models, problems, and runs of their training."""

from whence.core.packages import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
