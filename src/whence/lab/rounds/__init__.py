"""Whole rounds of optimisation: replayed, differentiated, scored, trained again."""

from whence.core.packages import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
