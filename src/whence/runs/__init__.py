"""Run directories: typed, versioned files of one training run, each written atomically, no pickles."""

from whence.runs.directory import PerRound, RunDirectory, Table

__all__ = ["PerRound", "RunDirectory", "Table"]
