"""The choice of an engine, with the reason in words."""

import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from jaxtyping import Float
from torch import Tensor

from whence.core import WhenceError, first_line, suggest
from whence.engines.forward import forward
from whence.engines.ghost import ghost
from whence.engines.memory import fit_chunk_size, is_out_of_memory
from whence.engines.parameters import is_in_shards
from whence.engines.per_record import loop, vmap
from whence.engines.probing import check_against_loop, check_mixing
from whence.engines.problem import Engine, Problem, Refused, target_gradients
from whence.engines.sharded import sharded

log = logging.getLogger("whence")

_ENGINES: dict[str, Engine] = {"ghost": ghost, "forward": forward, "vmap": vmap, "loop": loop}

ENGINES: Mapping[str, Engine] = MappingProxyType(_ENGINES)
"""All engines by name."""


def register_engine(name: str, engine: Engine) -> None:
    """Add an engine under a name. `auto` does not choose it; `check_engines` compares it with the loop.

    Args:
        name: the name for `attribute(engine=...)`.
        engine: a function that takes a `Problem` and returns the products of all records, (targets, n). It should
            iterate over `problem.parts()`, since its memory is measured on a few records.

    Raises:
        WhenceError: there is an engine of that name.
    """
    if name == "auto" or name in _ENGINES:
        raise WhenceError(f"There is an engine {name!r} already; choose another name.")
    _ENGINES[name] = engine


def solve(problem: Problem, engine: str, memory: int | None) -> tuple[Float[Tensor, "targets n"], str, str]:
    """Run an engine; return the products, the name of the engine that computed them and why it was chosen.

    "auto" tries ghost, which needs a rule for each layer, then forward, then vmap, then the loop, which covers
    everything. An engine that does not cover the policy raises rather than guess, and the next one runs. `memory` are
    bytes that set the problem's chunk size; None: it stays.
    """
    check_engine(engine)
    if is_in_shards(problem.parameters.values()):
        if engine not in ("auto", "ghost"):
            raise WhenceError(
                f"engine is {engine!r}, and the parameters are in shards, which only ghost covers: use 'auto'."
            )
        if memory is not None:
            raise WhenceError(
                "memory cannot be measured where the parameters are in shards: give the most records of a pass, "
                "chunk_size."
            )
        return sharded(problem), "ghost", "the parameters are in shards"
    check_mixing(problem)
    if engine in ("ghost", "forward", "vmap"):
        return _run_checked(problem, engine, memory), engine, "asked for"
    if engine != "auto":  # the loop, or a user's, which may approximate
        return run_engine(problem, ENGINES[engine], memory), engine, "asked for"
    reasons = list[str]()
    for name in ("ghost", "forward", "vmap"):
        try:
            products = _run_checked(problem, name, memory)
            return products, name, " ".join(reasons) or "every trainable layer has a ghost rule"
        except Refused as refusal:
            reasons.append(f"{name}: {refusal}")
    _warn_of_loop(" ".join(reasons))
    return run_engine(problem, loop, memory), "loop", " ".join(reasons)


@cache
def _warn_of_loop(reasons: str) -> None:
    """Say once that scoring is slow, and why."""
    log.warning("Scored by the slowest engine, the loop: a backward pass for each record. %s", reasons)


def check_engine(engine: object) -> None:
    """Refuse what is neither "auto" nor the name of an engine."""
    if engine not in ("auto", *ENGINES):
        raise WhenceError(f"engine is {engine!r}.{suggest(str(engine), ['auto', *ENGINES])}")


def _run_checked(problem: Problem, engine: str, memory: int | None) -> Float[Tensor, "targets n"]:
    try:
        check_against_loop(problem, ENGINES[engine])
        return run_engine(problem, ENGINES[engine], memory)
    except (AttributeError, RuntimeError) as missing:  # what the engine's transform lacks, or all engines fail on
        if is_out_of_memory(missing):
            raise
        raise Refused(f"It fails on this policy: {first_line(missing)} Use engine='auto'.") from missing


def run_engine(problem: Problem, run: Engine, memory: int | None) -> Float[Tensor, "targets n"]:
    """Run an engine within `memory` bytes; None: by the problem's chunk size."""
    return run(
        problem if memory is None else fit_chunk_size(problem, _loop_parts_that_grow if run is loop else run, memory)
    )


def _loop_parts_that_grow(problem: Problem) -> None:
    # The loop's passes over single records hold no more for many records than for one.
    target_gradients(problem)
    problem.inputs  # noqa: B018
