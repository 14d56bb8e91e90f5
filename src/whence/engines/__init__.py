"""Engines: they compute all per-record products with the gradients of one or several targets."""

from whence.engines.auto import ENGINES as ENGINES
from whence.engines.auto import check_engine as check_engine
from whence.engines.auto import register_engine as register_engine
from whence.engines.auto import solve as solve
from whence.engines.loop import record_gradient as record_gradient
from whence.engines.memory import check_memory as check_memory
from whence.engines.problem import Engine as Engine
from whence.engines.problem import Gradient as Gradient
from whence.engines.problem import Problem as Problem
from whence.engines.problem import Refused as Refused
from whence.engines.problem import target_gradients as target_gradients
from whence.engines.rules import LayerRule as LayerRule
from whence.engines.rules import register_rule as register_rule
