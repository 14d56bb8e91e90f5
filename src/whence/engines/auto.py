"""The choice of an engine, with its reason in words."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from whence.engines.forward import forward
from whence.engines.ghost import ghost
from whence.engines.loop import loop
from whence.engines.memory import fitted
from whence.engines.problem import Engine, Problem, Refused, takes_no_part, target_gradients
from whence.engines.vmap import vmap
from whence.errors import WhenceError, first_line, suggest

_ENGINES: dict[str, Engine] = {"ghost": ghost, "forward": forward, "vmap": vmap, "loop": loop}

ENGINES: Mapping[str, Engine] = MappingProxyType(_ENGINES)
"""All engines by name."""


def register_engine(name: str, engine: Engine) -> None:
    """Let an engine of one's own be asked for by name; `auto` does not take it, `check_engines` holds it to the loop.

    Args:
        name: what `attribute(engine=...)` calls it.
        engine: takes a `Problem`, returns the products of all records, (targets, n), and should go through
            `problem.parts()`, since its memory is measured on a few records.

    Raises:
        WhenceError: the name is taken.
    """
    if name == "auto" or name in _ENGINES:
        raise WhenceError(f"There is an engine {name!r} already; choose another name.")
    _ENGINES[name] = engine


def solve(problem: Problem, engine: str, memory: int | None) -> tuple[Float[Tensor, "targets n"], str, str]:
    """Run an engine; return the products, the engine that gave them and why it was taken.

    "auto" looks at the layers first: ghost where each has a rule, else forward, else vmap. An engine that finds while
    running that it does not cover the policy raises rather than guess, and the next takes over; the loop covers
    everything.

    Args:
        problem: what to score.
        engine: "auto" or a key of `ENGINES`.
        memory: bytes that set the problem's chunk size; None: it stands as it is.

    Raises:
        WhenceError: an unknown engine, one that refuses, or an objective that fails on a part of the records.
    """
    try:
        return _solved(problem, engine, memory)
    except (WhenceError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except Exception as failure:
        if not takes_no_part(problem):
            raise
        raise WhenceError(
            f"The objective takes all {len(problem.records)} records, but fails on a part of them "
            f"({first_line(failure)}). Engines call it on parts, down to one record: let it read what belongs to a "
            "record from the records it is given (`rewards`, `returns`, or `advantages` as its `prepare` sets them), "
            "not from numbers of its own."
        ) from failure


def _solved(problem: Problem, engine: str, memory: int | None) -> tuple[Float[Tensor, "targets n"], str, str]:
    if engine in ENGINES:
        return _run(problem, engine, memory), engine, "asked for"
    if engine != "auto":
        raise WhenceError(f"engine is {engine!r}.{suggest(engine, ['auto', *ENGINES])}")
    try:
        return _run(problem, "ghost", memory), "ghost", "every trainable layer has a ghost rule"
    except Refused as refusal:
        reason = str(refusal)
    try:
        return _run(problem, "forward", memory), "forward", reason
    except NotImplementedError as missing:  # torch's word for a kernel without forward mode
        reason += f" Forward mode: {first_line(missing)}"
    try:
        return _run(problem, "vmap", memory), "vmap", reason
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as missing:  # functorch's only word for whatever it cannot do; the loop meets what is amiss
        return _run(problem, "loop", memory), "loop", f"{reason} vmap: {first_line(missing)}"


def _run(problem: Problem, engine: str, memory: int | None) -> Float[Tensor, "targets n"]:
    run = ENGINES[engine]
    return run(problem if memory is None else fitted(problem, _what_grows_in_loop if run is loop else run, memory))


def _what_grows_in_loop(problem: Problem) -> None:
    # The passes over one record after the other hold no more for many records than for one.
    target_gradients(problem)
    problem.inputs  # noqa: B018
