"""The choice of an engine, with its reason in words."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from whence.engines.forward import forward
from whence.engines.ghost import ghost
from whence.engines.loop import loop
from whence.engines.problem import Engine, Problem, Refused
from whence.errors import WhenceError, nearest

ENGINES: Mapping[str, Engine] = MappingProxyType({"ghost": ghost, "forward": forward, "loop": loop})


def solve(problem: Problem, engine: str) -> tuple[Float[Tensor, "targets n"], str, str]:
    """Run an engine; return the products, the engine that gave them and why it was taken.

    "auto" looks at the layers first: ghost where each has a rule, else forward. An engine that finds while running
    that it does not cover the policy raises rather than guess, and the next takes over; the loop covers everything.
    """
    if engine in ENGINES:
        return ENGINES[engine](problem), engine, "asked for"
    if engine != "auto":
        raise WhenceError(f"engine is {engine!r}.{nearest(engine, ['auto', *ENGINES])}")
    try:
        return ghost(problem), "ghost", "every trainable layer has a ghost rule"
    except Refused as refusal:
        reason = str(refusal)
    try:
        return forward(problem), "forward", reason
    except NotImplementedError as missing:  # torch's word for a kernel without forward mode
        return loop(problem), "loop", f"{reason} Forward mode: {str(missing).splitlines()[0]}"
