"""The laboratory: presets, arms, comparisons, sweeps, whole rounds, and what they are measured by."""

from whence.core.packages import attach_face

__getattr__, __dir__, __all__ = attach_face(__name__, __file__)
