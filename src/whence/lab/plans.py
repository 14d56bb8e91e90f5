"""Planned runs: their configurations, what runs them, and the sweep files that ask for many."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from whence.core import WhenceError, suggest
from whence.lab.agents import RunConfig, configure_arms
from whence.lab.arms import STANDARD
from whence.stored.language import LanguageConfig
from whence.validation import read_table, settings

AnyConfig: TypeAlias = RunConfig | LanguageConfig
"""One run of either kind."""


def read_config(values: Any) -> AnyConfig:
    """Return the configuration that its `to_json` returned; a `WhenceError` if the values are none's."""
    is_agent = isinstance(values, Mapping) and "env" in values
    return RunConfig.from_json(values) if is_agent else LanguageConfig.from_json(values)


def runner_of(config: AnyConfig) -> Any:
    """Return the module that runs such a configuration, by `prepare`, `check`, `run`, `is_finished` and `read_curve`.

    What it trains with is imported here.
    """
    kind = "language" if isinstance(config, LanguageConfig) else "agents"
    return import_module(f"whence.lab.{kind}.training")


@dataclass(frozen=True, eq=False)  # its configuration holds dicts, which have no hash
class Planned:
    """One run of a comparison or a sweep.

    Attributes:
        group: the name of a sweep's experiment, whose runs differ in arm, share to drop and seed only; None: it is a
            run of a comparison.
        label: the arm's name, followed by the share to drop if that is not the group's: "iif", "iif-drop0.25".
        config: the run.
    """

    group: str | None
    label: str
    config: AnyConfig

    @property
    def name(self) -> str:
        """The group, the label and the seed as a path."""
        return "/".join(filter(None, (self.group, self.label, f"seed_{self.config.seed}")))

    def run_path(self, out: Path) -> Path:
        """Return the run's directory below that of its comparison or sweep."""
        return out / "runs" / self.name


OVERRIDES = tuple(each.name for each in fields(RunConfig) if each.name not in ("env", "arm", "seed", "drop"))
"""Fields of a run that a sweep may set for all of an experiment's runs."""


@settings("A sweep")
class _Sweep:
    """A sweep file."""

    experiment: Annotated[list[Mapping[str, Any]], Field(min_length=1)]


@settings("An experiment")
class _Experiment:
    """What an [[experiment]] of a sweep file says besides the fields of its runs."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]{0,99}$")]
    arms: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[int, Field(ge=1, le=10**6)] | Annotated[list[int], Field(min_length=1)]
    preset: str | None = None
    env: str | None = None
    drop: float | list[float] | None = None


def make_label(config: RunConfig, group_drop: float | None) -> str:
    """Return a run's label in a group whose usual share to drop is `group_drop`; None: the run's share is another."""
    if config.drop == group_drop:
        return config.arm
    return f"{config.arm}-drop{str(float(config.drop)).removesuffix('.0')}"


def find_differences(settings: dict[str, Any], label: str, config: RunConfig) -> list[str]:
    """Return the settings in which a run differs from the runs of its group before it; add new ones to `settings`."""
    varied = ("arm", "seed") if label == config.arm else ("arm", "seed", "drop")
    fixed = {name: value for name, value in config.to_json().items() if name not in varied}
    return [name for name, value in fixed.items() if settings.setdefault(name, value) != value]


def read_sweep(path: Path) -> list[Planned]:
    """Return the runs of a sweep file, in its order, seed by seed. All of it is checked here.

    Several experiments may share a name; a run that they have in common is made once.

    Raises:
        WhenceError: the file is not there or is no TOML, or something in it cannot be run; the experiment is named.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise WhenceError(
            f"{path} cannot be read as TOML ({error}). Write a sweep file; docs/reference/command.md shows one."
        ) from None
    try:
        return _plan_runs(read_table(_Sweep, "A sweep", document).experiment)
    except WhenceError as error:
        raise WhenceError(f"{path}: {error}") from error


def _plan_runs(experiments: Iterable[Mapping[str, Any]]) -> list[Planned]:
    """Return the runs of all experiments, each once."""
    runs: dict[str, Planned] = {}
    groups: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(experiments, start=1):
        name = str(entry.get("name", number))
        try:
            usual, planned_runs = _plan_experiment(entry)
        except WhenceError as error:
            raise WhenceError(f"experiment {name}: {error}") from error
        if others := find_differences(groups.setdefault(name, {}), usual.arm, usual):
            raise WhenceError(
                f"The name {name!r} stands over runs that differ in {', '.join(others)}; give each experiment a name "
                "of its own."
            )
        for planned in planned_runs:
            runs.setdefault(planned.name, planned)
    for group in groups:
        if not any(planned.group == group and planned.config.arm == STANDARD for planned in runs.values()):
            raise WhenceError(
                f"The experiment {group!r} lacks the arm {STANDARD!r}, which the others are measured against. Add it."
            )
    return list(runs.values())


def _plan_experiment(entry: Mapping[str, Any]) -> tuple[RunConfig, list[Planned]]:
    """Return a run with the experiment's usual share to drop, and the experiment's runs, seed by seed."""
    known = {each.name for each in fields(_Experiment)}
    if unknown := [name for name in entry if name not in known | {*OVERRIDES}]:
        raise WhenceError(f"An experiment has no {unknown[0]!r}.{suggest(unknown[0], known | {*OVERRIDES})}")
    experiment = _Experiment(**{name: value for name, value in entry.items() if name in known})
    overrides = {name: value for name, value in entry.items() if name in OVERRIDES}
    configs = configure_arms(experiment.arms, env=experiment.env, preset=experiment.preset, **overrides)
    runs = []
    for seed in range(experiment.seeds) if isinstance(experiment.seeds, int) else experiment.seeds:
        for usual in configs:
            # What an arm does not read would make the same run several times.
            drop = experiment.drop if usual.reads("drop") else None
            for share in drop if isinstance(drop, list) else [usual.drop if drop is None else drop]:
                config = replace(usual, seed=seed, drop=share)
                runs.append(Planned(experiment.name, make_label(config, usual.drop), config))
    return configs[0], runs
