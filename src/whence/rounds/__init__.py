"""Rounds of optimisation: recorded, replayed, differentiated."""

from whence.rounds.recording import OptimizerState as OptimizerState
from whence.rounds.recording import RoundRecording as RoundRecording
from whence.rounds.recording import Update as Update
from whence.rounds.replay import replay as replay
from whence.rounds.round_scores import METHODS as METHODS
from whence.rounds.round_scores import attribute_round as attribute_round
from whence.rounds.round_scores import attribute_round_by as attribute_round_by
from whence.rounds.smoothed import DRAWS as DRAWS
from whence.rounds.smoothed import SHARE as SHARE
