"""whence: which records of a rollout made a policy act as it does, which helped or harmed its learning.

A positive influence means: training on the record raises the target.
"""

from importlib import import_module
from typing import Any

from whence.attribution import attribute as attribute
from whence.checks import check_engines as check_engines
from whence.crossfitting import attribute_crossfit as attribute_crossfit
from whence.errors import InvalidInfluence as InvalidInfluence
from whence.errors import InvalidRecords as InvalidRecords
from whence.errors import NonFinite as NonFinite
from whence.errors import RunDirectoryError as RunDirectoryError
from whence.errors import Unsupported as Unsupported
from whence.errors import WhenceError as WhenceError
from whence.heuristics import AdvantageMismatch as AdvantageMismatch
from whence.heuristics import TDErrorPriority as TDErrorPriority
from whence.influence import Influence as Influence
from whence.objectives import A2C as A2C
from whence.objectives import PPOClip as PPOClip
from whence.policies import ModuleView as ModuleView
from whence.policies import Outputs as Outputs
from whence.policies import PolicyView as PolicyView
from whence.policies import register_view
from whence.records import RecordBatch as RecordBatch
from whence.rounds import RoundRecording as RoundRecording
from whence.rounds import attribute_round as attribute_round
from whence.runs import RunDirectory as RunDirectory
from whence.selection import IIF as IIF
from whence.selection import IPPO as IPPO
from whence.selection import BelowMean as BelowMean
from whence.selection import KeepAll as KeepAll
from whence.selection import NegativeRandom as NegativeRandom
from whence.selection import NonPositive as NonPositive
from whence.selection import Progress as Progress
from whence.selection import RandomDrop as RandomDrop
from whence.selection import Selection as Selection
from whence.selection import SelectionRule as SelectionRule
from whence.targets import Action as Action
from whence.targets import Return as Return

__version__ = "0.1.0"


def _sb3_view(policy: Any) -> PolicyView:
    # SB3 is an extra: it is imported when one of its policies arrives.
    view: PolicyView = import_module("whence.sb3.policy").actor_critic_view(policy)
    return view


register_view("stable_baselines3", _sb3_view)


def __getattr__(name: str) -> Any:
    if name in ("sb3", "llm"):
        return import_module(f"whence.{name}")
    raise AttributeError(f"module 'whence' has no attribute {name!r}")
