"""Recorded rounds of optimisation: what `train()` did, as data."""

from whence.rounds.identity import check_collected as check_collected
from whence.rounds.identity import check_policy as check_policy
from whence.rounds.recording import OptimizerState as OptimizerState
from whence.rounds.recording import RoundRecording as RoundRecording
from whence.rounds.recording import Update as Update
