"""`whence list`. It repeats what engines and targets are, since their modules take long to import."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from whence.cli.terminal import HAS_LABORATORY, AsJson, console, make_table, print_json, print_line, require_laboratory

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
    if what in ("arms", "presets"):
        require_laboratory(f"whence list {what}")
    lists = (_list_laboratory() if HAS_LABORATORY else {}) | {"engines": ENGINES, "targets": TARGETS}
    chosen = {kind: entries for kind, entries in lists.items() if what is None or kind.startswith(what)}
    if json:
        print_json(chosen)
        return
    for kind, entries in chosen.items():
        if kind.startswith("arms"):
            rows = [(name, *arm.values()) for name, arm in entries.items()]
            console.print(make_table(kind, ("name", "unit", "needs", "costs", "what it is"), rows))
        else:
            console.print(make_table(kind, ("name", "what it is"), entries.items()))
    if "arms" in chosen:
        print_line("random-ARM drops as many as ARM, at random. any: --unit says what is kept or dropped as one.")
        print_line("groups: several responses to a prompt. discrete: states and actions.")
    if "presets" in chosen:
        print_line(
            "lda-code/... are what LDA's published code runs, paper/... what the paper prints: gradients clipped."
        )


def _list_laboratory() -> dict[str, Mapping[str, Any]]:
    from whence.lab import ARMS, LANGUAGE_ARMS, STANDARD, read_presets

    language_arms = {"none" if name == STANDARD else name: arm for name, arm in LANGUAGE_ARMS.items()}
    return {
        "arms": {name: _describe_arm(arm) for name, arm in ARMS.items()},
        "arms of language models": {name: _describe_arm(arm) for name, arm in language_arms.items()},
        "presets": {name: _describe_preset(values) for name, values in read_presets().items()},
    }


def _describe_arm(arm: Any) -> dict[str, str]:
    costs = "scoring" if "scores" in arm.needs else "-"
    return {"unit": arm.unit or "-", "needs": arm.needs or "-", "costs": costs, "about": arm.about}


def _describe_preset(values: Mapping[str, Any]) -> str:
    limit = values["hyperparameters"]["max_grad_norm"]
    clipping = f"clipped to {limit}" if math.isfinite(limit) else "unclipped"
    return f"{values['env']}, {values['rounds']} rounds, {values['optimizer']}, {clipping}"
