"""`whence list`. It repeats what engines and targets are, since their modules take long to import."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from whence.cli.terminal import AsJson, console, make_table, print_json, print_line
from whence.experiments import ARMS, presets

ENGINES = {
    "auto": "ghost where every layer has a rule, else forward, else vmap, else loop",
    "ghost": "one forward and backward pass, products layer by layer; no per-record gradient",
    "forward": "forward-mode differentiation; every layer whose kernels have it",
    "vmap": "per-record gradients, many at a time; much memory",
    "loop": "one record after the other; the truth the others are tested against",
}

TARGETS = {
    "return": "the expected return's stand-in, mean(log-prob times advantage) over the round",
    "action": "the log-probability of an action in an observation",
}


def list_(
    what: Annotated[
        Literal["arms", "presets", "engines", "targets"] | None,
        typer.Argument(help="All of them by default.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Name the arms, presets, engines and targets there are.

    Example: whence list arms
    """
    lists: dict[str, Mapping[str, str]] = {
        "arms": {name: arm.about for name, arm in ARMS.items()},
        "presets": {name: _describe_preset(values) for name, values in presets().items()},
        "engines": ENGINES,
        "targets": TARGETS,
    }
    chosen = lists if what is None else {what: lists[what]}
    if json:
        print_json(chosen)
        return
    for kind, entries in chosen.items():
        console.print(make_table(kind, ("name", "what it is"), entries.items()))
    if "presets" in chosen:
        print_line(
            "lda-code/... are what LDA's published code runs, paper/... what the paper prints: gradients clipped."
        )


def _describe_preset(values: Mapping[str, Any]) -> str:
    limit = values["hyperparameters"]["max_grad_norm"]
    clipping = f"clipped to {limit}" if math.isfinite(limit) else "unclipped"
    return f"{values['env']}, {values['rounds']} rounds, {values['optimizer']}, {clipping}"
