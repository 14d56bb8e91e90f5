"""Engines: they compute all per-record products with the gradients of one or several targets."""

from whence.engines.auto import ENGINES as ENGINES
from whence.engines.auto import check_engine as check_engine
from whence.engines.auto import register_engine as register_engine
from whence.engines.auto import solve as solve
from whence.engines.forward import outputs_along as outputs_along
from whence.engines.gradient_masks import add_masks as add_masks
from whence.engines.memory import check_memory as check_memory
from whence.engines.memory import measure_bytes as measure_bytes
from whence.engines.per_record import record_gradient as record_gradient
from whence.engines.probing import Along as Along
from whence.engines.probing import check_against_loop as check_against_loop
from whence.engines.probing import check_mixing as check_mixing
from whence.engines.problem import Gradient as Gradient
from whence.engines.problem import Problem as Problem
from whence.engines.problem import Refused as Refused
from whence.engines.problem import Summed as Summed
from whence.engines.problem import check_scalar as check_scalar
from whence.engines.problem import compute_seeds as compute_seeds
from whence.engines.problem import target_gradients as target_gradients
from whence.engines.rules import LayerRule as LayerRule
from whence.engines.rules import LayerTensors as LayerTensors
from whence.engines.rules import linear_gradient as linear_gradient
from whence.engines.rules import linear_product as linear_product
from whence.engines.rules import register_rule as register_rule
from whence.engines.rules import rule_for as rule_for
from whence.engines.sharded import agree_on_most as agree_on_most
