"""What a sweep file asks for, checked before anything runs; what is wrong is named with its line."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from whence.errors import WhenceError, suggest
from whence.experiments.rl.arms import ARMS, find_arm
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.curves import EXTRA_COLUMNS
from whence.experiments.rl.plan import check_read, configure_arms, reads
from whence.experiments.shared import STANDARD

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
        WhenceError: the file is not there or is no TOML, or something in it cannot be run; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        raise WhenceError(
            f"{path} cannot be read ({error.strerror}). Write a sweep file; docs/reference/command.md shows one."
        ) from None
    except (RecursionError, ValueError) as error:
        raise WhenceError(f"{path} is not TOML: {error}.") from None
    try:
        experiments, metrics = _read_experiments(document), _read_metrics(document)
        return [replace(planned, metrics=metrics) for planned in _plan_runs(experiments)]
    except _LocatedError as error:
        raise WhenceError(f"{path}, line {_find_line(text, error.place)}: {error}") from error.__cause__


class _LocatedError(WhenceError):
    """A fault in a sweep file, with its place.

    Attributes:
        place: the keys that lead to it.
    """

    def __init__(self, text: str, *place: str | int) -> None:
        super().__init__(text)
        self.place = place


def _find_line(text: str, place: tuple[str | int, ...]) -> int:
    """Return the line on which the value at a place begins; if it is missing, the line of what it would be in.

    A value's line is the first one with which the file, read up to there, holds the value. A file that ends within a
    value of several lines is no TOML, so that such a value begins after the last line up to which the file is TOML.
    """
    line_of: dict[tuple[str | int, ...], int] = {}
    lines, begin = text.split("\n"), 1
    for number in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:number]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for known in _list_places(document):
            line_of.setdefault(known, begin)
        begin = number + 1
    return next(line_of[place[:length]] for length in range(len(place), -1, -1) if place[:length] in line_of)


def _list_places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from _list_places(entry, (*place, key))


def _read_experiments(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if unknown := [key for key in document if key not in ("experiment", "metrics")]:
        raise _LocatedError(
            f"A sweep has no {unknown[0]!r}; it is made of [[experiment]] tables, and before them may say `metrics`.",
            unknown[0],
        )
    experiments = document.get("experiment")
    if not isinstance(experiments, list) or not experiments:
        raise _LocatedError("There is no [[experiment]] (in two pairs of brackets), so nothing to run.", "experiment")
    for number, entry in enumerate(experiments):
        if not isinstance(entry, Mapping):
            raise _LocatedError(f"An experiment is {entry!r}; an [[experiment]] table is needed.", "experiment", number)
    return experiments


def _read_metrics(document: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = document.get("metrics", [])
    if (
        not isinstance(metrics, list)
        or not all(name in EXTRA_COLUMNS for name in metrics)
        or len({*metrics}) < len(metrics)
    ):
        raise _LocatedError(
            f"metrics is {metrics!r}; a list of some of {', '.join(EXTRA_COLUMNS)} is needed, each once.", "metrics"
        )
    return tuple(metrics)


def _plan_runs(experiments: Iterable[Mapping[str, Any]]) -> list[Planned]:
    """Return the runs of all experiments, each once."""
    runs: dict[str, Planned] = {}
    groups: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, entry in enumerate(experiments):
        try:
            usual, planned_runs = _plan_experiment(entry)
        except WhenceError as error:
            place = error.place if isinstance(error, _LocatedError) else _find_place(entry, str(error))
            raise _LocatedError(str(error), "experiment", number, *place) from error
        _, settings = groups.setdefault(entry["name"], (number, {}))
        if others := find_differences(settings, usual.arm, usual):
            names = ", ".join("the share that the preset drops" if name == "drop" else name for name in others)
            key = next((key for key in (others[0], "preset", "env") if key in entry and key != "drop"), "name")
            raise _LocatedError(
                f"The name {entry['name']!r} stands over runs that differ in {names}; give this experiment another "
                "name.",
                *("experiment", number, key),
            )
        for planned in planned_runs:
            runs.setdefault(planned.name, planned)
    for group, (number, _) in groups.items():
        if not any(planned.group == group and planned.config.arm == STANDARD for planned in runs.values()):
            raise _LocatedError(
                f"The experiment {group!r} lacks the arm {STANDARD!r}, which the others are measured against. Add it.",
                *("experiment", number, "name"),
            )
    return list(runs.values())


def _find_place(entry: Mapping[str, Any], message: str) -> tuple[str, ...]:
    """Return the key of an experiment that an error's message names first.

    If it names none: the key of the table or the list with a key or a text that it names; else the experiment's name.
    """
    words: list[tuple[int, Any, tuple[str, ...]]] = [(0, key, (key,)) for key in entry]
    for key, value in entry.items():
        if isinstance(value, Mapping):
            words += [(1, inner, (key, inner)) for inner in value] + [(1, text, (key,)) for text in value.values()]
        else:
            words += [(1, text, (key,)) for text in (value if isinstance(value, list) else [value])]
    places = [
        (rank, match.start(), place)
        for rank, word, place in words
        if isinstance(word, str) and word and (match := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message))
    ]
    return min(places)[2] if places else ("name",)


def _plan_experiment(entry: Mapping[str, Any]) -> tuple[RunConfig, list[Planned]]:
    """Return a run with the experiment's usual share to drop, and the experiment's runs, seed by seed."""
    if unknown := [key for key in entry if key not in KEYS]:
        raise WhenceError(f"An experiment has no {unknown[0]!r}.{suggest(unknown[0], KEYS)}")
    group = entry.get("name")
    if not isinstance(group, str) or not re.fullmatch(r"\w[\w.-]{0,99}", group):
        raise WhenceError(
            f"The experiment's name is {group!r}; a letter or digit, then letters, digits, '-', '_' and '.', 100 at "
            "most, make a file's name of it."
        )
    arms = _read_arms(entry.get("arms"))
    preset = entry.get("preset")
    if preset is not None and not isinstance(preset, str):
        raise WhenceError(f"preset is {preset!r}; text is needed.")
    overrides = {name: entry[name] for name in OVERRIDES if name in entry}
    configs = configure_arms(arms, env=entry.get("env"), preset=preset, **overrides)
    check_read(configs, [name for name in READ if name in entry])
    runs = []
    for seed in _read_seeds(entry.get("seeds")):
        for usual in configs:
            # What an arm does not read would make the same run several times.
            shares = _read_shares(entry.get("drop", usual.drop)) if reads(usual, "drop") else [usual.drop]
            for drop in shares:
                # A share that is refused is refused as it is in the file, before it is converted.
                config = replace(replace(usual, drop=drop), seed=seed, drop=float(drop))
                runs.append(Planned(group, make_label(config, usual.drop), config))
    return configs[0], runs


def _read_arms(arms: Any) -> list[str]:
    is_list = isinstance(arms, list) and all(isinstance(arm, str) for arm in arms)
    if not is_list or not arms or len(set(arms)) < len(arms):
        raise _LocatedError(
            f"arms is {arms!r}; a list that names each arm once is needed. Known: {', '.join(ARMS)}.", "arms"
        )
    for place, arm in enumerate(arms):
        try:
            find_arm(arm)
        except WhenceError as unknown:
            raise _LocatedError(str(unknown), "arms", place) from None
    return list(arms)


def _read_seeds(seeds: Any) -> list[int]:
    if type(seeds) is int and 1 <= seeds <= 2**32:
        return list(range(seeds))
    if isinstance(seeds, list) and seeds and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):
        if len(set(seeds)) < len(seeds):
            raise WhenceError(f"seeds is {seeds!r}; name each once.")
        return seeds
    raise WhenceError(
        f"seeds is {seeds!r}; give how many there are, or a list of them, each 0 or more and of 32 bits at most."
    )


def _read_shares(drop: Any) -> list[int | float]:
    shares = drop if isinstance(drop, list) else [drop]
    if not shares or any(type(share) not in (int, float) for share in shares):
        raise WhenceError(f"drop is {drop!r}; a number is needed, or a list of numbers.")
    if len(set(shares)) < len(shares):
        raise WhenceError(f"drop is {drop!r}; name each once.")
    return shares
