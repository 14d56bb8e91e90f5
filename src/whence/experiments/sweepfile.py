"""Sweep files: the runs that one asks for, all checked before anything runs."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from whence.errors import WhenceError
from whence.experiments.rl.arms import find_arm
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.curves import EXTRA_COLUMNS
from whence.experiments.rl.plan import check_read, configure_arms, reads
from whence.experiments.shared import STANDARD, check_known, check_type

OVERRIDES = tuple(field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed", "drop"))
"""Fields of a run that a sweep may set for all of an experiment's runs."""

KEYS = ("name", "preset", "env", "arms", "seeds", "drop", *OVERRIDES)
"""What an [[experiment]] of a sweep file may say."""

READ = ("drop", "warmup", "target", "target_args", "engine")
"""Fields of a run that not every arm reads."""


@dataclass(frozen=True, eq=False)  # its configuration holds dicts, which have no hash
class Planned:
    """One run of a sweep.

    Attributes:
        group: the experiment's name; runs of one group differ in arm, share to drop and seed only.
        label: the arm's name, followed by the share to drop if that is not the group's: "iif", "iif-drop0.25".
        config: the run.
        metrics: further columns of its metrics that the results have; some of `EXTRA_COLUMNS`.
    """

    group: str
    label: str
    config: RunConfig
    metrics: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The group, the label and the seed as a path."""
        return f"{self.group}/{self.label}/seed_{self.config.seed}"

    def run_path(self, out: Path) -> Path:
        """Return the run's directory while it is under way."""
        return out / "runs" / self.name


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

    ```toml
    metrics = ["train/entropy_loss"]  # further columns of every round's results, from `EXTRA_COLUMNS`

    [[experiment]]
    name = "frozenlake"
    preset = "lda-code/frozenlake"   # or env = "CartPole-v1"
    arms = ["ppo", "iif", "random"]
    seeds = 10                       # 0 ... 9; or a list of them
    drop = [0.25, 0.5]               # one or several; the preset's if it is left out
    rounds = 20                      # any other field of a run holds for all of them
    ```

    Several experiments may share a name; a run that they have in common is made once.

    Raises:
        WhenceError: the file is not there or is no TOML, or something in it cannot be run; the experiment is named.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WhenceError(
            f"{path} cannot be read ({error.strerror}). Write a sweep file; docs/reference/command.md shows one."
        ) from None
    except (RecursionError, ValueError) as error:
        raise WhenceError(f"{path} is not TOML: {error}.") from None
    try:
        check_known("A sweep", document, ("experiment", "metrics"))
        metrics = document.get("metrics", [])
        if not isinstance(metrics, list) or not all(name in EXTRA_COLUMNS for name in metrics):
            raise WhenceError(f"metrics is {metrics!r}; a list of some of {', '.join(EXTRA_COLUMNS)} is needed.")
        experiments = document.get("experiment")
        if not isinstance(experiments, list) or not experiments:
            raise WhenceError("There is no [[experiment]] (in two pairs of brackets), so nothing to run.")
        return [replace(planned, metrics=tuple(metrics)) for planned in _plan_runs(experiments)]
    except WhenceError as error:
        raise WhenceError(f"{path}: {error}") from error


def _plan_runs(experiments: Iterable[Mapping[str, Any]]) -> list[Planned]:
    """Return the runs of all experiments, each once."""
    runs: dict[str, Planned] = {}
    groups: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(experiments, start=1):
        name = entry.get("name", number) if isinstance(entry, Mapping) else number
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
    check_known("An experiment", entry, KEYS)
    group, preset = entry.get("name"), entry.get("preset")
    if not isinstance(group, str) or not re.fullmatch(r"\w[\w.-]{0,99}", group):
        raise WhenceError(
            f"name is {group!r}; a letter or digit, then letters, digits, '-', '_' and '.', 100 at most, are needed."
        )
    if preset is not None:
        check_type("preset", preset, str)
    overrides = {name: entry[name] for name in OVERRIDES if name in entry}
    arms = _read_list("arms", entry.get("arms"), str)
    for arm in arms:
        find_arm(arm)
    configs = configure_arms(arms, env=entry.get("env"), preset=preset, **overrides)
    check_read(configs, [name for name in READ if name in entry])
    runs = []
    for seed in _read_seeds(entry.get("seeds")):
        for usual in configs:
            # What an arm does not read would make the same run several times.
            drop = entry.get("drop", usual.drop) if reads(usual, "drop") else usual.drop
            for share in _read_list("drop", drop if isinstance(drop, list) else [drop], float):
                # A share that is refused is refused as it is in the file, before it is converted.
                config = replace(replace(usual, drop=share), seed=seed, drop=float(share))
                runs.append(Planned(group, make_label(config, usual.drop), config))
    return configs[0], runs


def _read_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, list):
        return _read_list("seeds", seeds, int)
    check_type("seeds", seeds, int)
    if not 1 <= seeds <= 10**6:
        raise WhenceError(f"seeds is {seeds}; give how many there are, or a list of them.")
    return list(range(seeds))


def _read_list(name: str, values: Any, kind: type) -> list[Any]:
    """Return a list that names each of its values once."""
    if not isinstance(values, list) or not values or len({*map(repr, values)}) < len(values):
        raise WhenceError(f"{name} is {values!r}; a list that names each once is needed.")
    for value in values:
        check_type(name, value, kind)
    return values
