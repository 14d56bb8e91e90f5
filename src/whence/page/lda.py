"""The figures that LDA (arXiv 2505.19281) reports, for its settings."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from whence.experiments import RunConfig
from whence.experiments.rl.presets import presets

_EVALUATION = {"eval_episodes", "eval_every"}


@cache
def _read_figures() -> Mapping[str, Any]:
    return tomllib.loads((files("whence.page") / "lda.toml").read_text(encoding="utf-8"))


def find_preset(config: RunConfig) -> str | None:
    """Return the name of LDA's preset that a run has, with any arm, seed, share to drop and evaluations; else None."""
    fields = {name: getattr(config, name) for name in ("arm", "seed", "drop")}
    for name in (f"{family}/{env}" for env in _read_figures() for family in ("lda-code", "paper")):
        preset = RunConfig(**{**presets()[name], **fields})
        if {key for key, value in vars(preset).items() if value != getattr(config, key)} <= _EVALUATION:
            return name
    return None


def find_figures(config: RunConfig) -> Mapping[str, Any]:
    """Return LDA's figures for a run's setting: none unless it is that of LDA's code, which does not clip."""
    family, _, env = (find_preset(config) or "").partition("/")
    return _read_figures()[env] if family == "lda-code" else {}


def find_row(config: RunConfig) -> tuple[str, Mapping[str, Sequence[float]]] | None:
    """Return the name of LDA's row for a run, and its shares, each with its "±"; None if LDA has none."""
    figures = next((row for row in find_figures(config).get("iif", []) if row["drop"] == config.drop), None)
    if figures is None or config.arm != "iif":
        return None
    row = {name: figure for name, figure in figures.items() if name != "drop"}
    preset = RunConfig(**{**presets()[str(find_preset(config))], "arm": "iif", "seed": 0})
    if all(getattr(preset, key) == getattr(config, key) for key in _EVALUATION):
        return "LDA's iif", row
    return f"LDA's iif (its evaluations: every round, {preset.eval_episodes} episodes)", row


def write_note(config: RunConfig) -> str | None:
    """Say how LDA's figures relate to a run's setting; None if it is not one of LDA's."""
    family, _, env = (find_preset(config) or "").partition("/")
    if family == "lda-code":
        iif, ppo = find_figures(config)["seconds"]["iif"], find_figures(config)["seconds"]["ppo"]
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
