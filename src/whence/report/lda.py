"""What LDA (arXiv 2505.19281) reports, for the settings that are its own."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from whence.experiments import RunConfig, presets

_EVALUATION = {"eval_episodes", "eval_every"}


@cache
def _reported() -> Mapping[str, Any]:
    return tomllib.loads((files("whence.report") / "lda.toml").read_text(encoding="utf-8"))


def preset_of(config: RunConfig) -> str | None:
    """Return the preset of LDA's that a run has, whatever its arm, seed, share to drop and evaluations; else None."""
    own = {name: getattr(config, name) for name in ("arm", "seed", "drop")}
    for name in (f"{family}/{env}" for env in _reported() for family in ("lda-code", "paper")):
        theirs = RunConfig(**{**presets()[name], **own})
        if {key for key, value in vars(theirs).items() if value != getattr(config, key)} <= _EVALUATION:
            return name
    return None


def figures_of(config: RunConfig) -> Mapping[str, Any]:
    """Return LDA's figures for a run's setting: nothing where it is not that of LDA's code, which does not clip."""
    family, _, env = (preset_of(config) or "").partition("/")
    return _reported()[env] if family == "lda-code" else {}


def row_of(config: RunConfig) -> tuple[str, Mapping[str, Sequence[float]]] | None:
    """Return what LDA's row beside a run's is called, and its shares, each with its "±"; None where LDA has none."""
    found = next((row for row in figures_of(config).get("iif", []) if row["drop"] == config.drop), None)
    if found is None or config.arm != "iif":
        return None
    row = {name: figure for name, figure in found.items() if name != "drop"}
    theirs = RunConfig(**{**presets()[str(preset_of(config))], "arm": "iif", "seed": 0})
    if all(getattr(theirs, key) == getattr(config, key) for key in _EVALUATION):
        return "LDA's iif", row
    return f"LDA's iif (its evaluations: every round, {theirs.eval_episodes} episodes)", row


def note(config: RunConfig) -> str | None:
    """Say how LDA's figures stand to a run's setting; None where the setting is none of LDA's."""
    family, _, env = (preset_of(config) or "").partition("/")
    if family == "lda-code":
        iif, ppo = figures_of(config)["seconds"]["iif"], figures_of(config)["seconds"]["ppo"]
        return (
            "LDA's rows are means over its three runs; of what its ± is it says nothing. Its levels are every maximum, "
            "and its RT_peak is the paper's. Its seconds are wall-clock, on another machine: "
            f"{ppo['all_rounds']:.2f} s of ppo and {iif['all_rounds']:.2f} s of iif for all rounds, "
            f"{iif['to_peak']:.2f} s of iif until ppo's peak. They do not add up everywhere: {config.rounds} rounds of "
            f"ppo's optimisation alone would take {config.rounds * ppo['optimisation']:.0f} s."
        )
    if family == "paper":
        return (
            f"Gradients are clipped to a norm of {config.hyperparameters['max_grad_norm']:g}, as LDA's paper prints. "
            f"LDA's code does not clip, so LDA's figures stand beside lda-code/{env} only."
        )
    return None
