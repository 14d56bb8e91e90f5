"""What a sweep file asks for, checked before anything runs; what is wrong is named with its line."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from whence.errors import WhenceError, suggest
from whence.experiments.rl.arms import ARMS, describe_arms, unknown_arm
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.curves import MORE
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
        label: the arm's name, with the share where it is not the group's own: "iif", "iif-drop0.25".
        config: the run.
        metrics: columns of its metrics that are kept beside those that always are; see `MORE`.
    """

    group: str
    label: str
    config: RunConfig
    metrics: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The group, the label and the seed as a path."""
        return f"{self.group}/{self.label}/seed_{self.config.seed}"

    def file(self, out: Path, kind: str) -> Path:
        """Return the run's file of a kind ("curves", "timings") in a sweep's directory."""
        return out / kind / f"{self.name}.json"

    def run_path(self, out: Path) -> Path:
        """Return the run's directory while it is under way."""
        return out / "runs" / self.name


def make_label(config: RunConfig, own: float | None) -> str:
    """Return a run's label in a group whose own share to drop is `own`; None: one that is none of its own."""
    return config.arm if config.drop == own else f"{config.arm}-drop{str(float(config.drop)).removesuffix('.0')}"


def find_differences(settings: dict[str, Any], label: str, config: RunConfig) -> list[str]:
    """Return what a run has otherwise than the runs of its group before it; add to `settings` what they share."""
    own = config.to_json()
    varied = ("arm", "seed") if label == config.arm else ("arm", "seed", "drop")
    return [name for name, value in own.items() if name not in varied and settings.setdefault(name, value) != value]


def read_sweep(path: Path) -> list[Planned]:
    """Return the runs of a sweep file, in its order, seed by seed. All of it is checked here.

    ```toml
    metrics = ["train/entropy_loss"]  # kept of every round, beside what always is; from `MORE`

    [[experiment]]
    name = "frozenlake"
    preset = "lda-code/frozenlake"   # or env = "CartPole-v1"
    arms = ["ppo", "iif", "random"]
    seeds = 10                       # 0 ... 9; or a list of them
    drop = [0.25, 0.5]               # one, or several; without it the preset's
    rounds = 20                      # any other field of a run holds for all of them
    ```

    Several experiments may share a name; what they have in common is run once.

    Raises:
        WhenceError: the file is not there or is no TOML, or something in it cannot be run; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except OSError as wrong:
        raise WhenceError(
            f"{path} cannot be read ({wrong.strerror}). Write a sweep file; docs/command.md shows one."
        ) from None
    except (RecursionError, ValueError) as wrong:
        raise WhenceError(f"{path} is not TOML: {wrong}.") from None
    try:
        experiments, metrics = _experiments(document), _metrics(document)
        return [replace(planned, metrics=metrics) for planned in _runs(experiments)]
    except _Located as wrong:
        raise WhenceError(f"{path}, line {_line(text, wrong.place)}: {wrong}") from wrong.__cause__


class _Located(WhenceError):
    """Something that is wrong in a sweep file.

    Attributes:
        place: the keys that lead to it.
    """

    def __init__(self, text: str, *place: str | int) -> None:
        super().__init__(text)
        self.place = place


def _line(text: str, place: tuple[str | int, ...]) -> int:
    """Return the line on which what is at a place begins, or else what it would stand in.

    It is the first one that the lines above do not hold already, read by themselves; where these are no TOML, they end
    within a value of several lines.
    """
    found: dict[tuple[str | int, ...], int] = {}
    lines, begun = text.split("\n"), 1
    for number in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:number]) + "\n")
        except tomllib.TOMLDecodeError:
            continue
        for known in _places(document):
            found.setdefault(known, begun)
        begun = number + 1
    return next(found[place[:length]] for length in range(len(place), -1, -1) if place[:length] in found)


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inside:
        yield from _places(entry, (*place, key))


def _experiments(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if unknown := [key for key in document if key not in ("experiment", "metrics")]:
        raise _Located(
            f"A sweep has no {unknown[0]!r}; it is made of [[experiment]] tables, and before them may say `metrics`.",
            unknown[0],
        )
    experiments = document.get("experiment")
    if not isinstance(experiments, list) or not experiments:
        raise _Located("There is no [[experiment]] (in two pairs of brackets), so nothing to run.", "experiment")
    for number, entry in enumerate(experiments):
        if not isinstance(entry, Mapping):
            raise _Located(f"An experiment is {entry!r}; an [[experiment]] table is needed.", "experiment", number)
    return experiments


def _metrics(document: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = document.get("metrics", [])
    if not isinstance(metrics, list) or not all(name in MORE for name in metrics) or len({*metrics}) < len(metrics):
        raise _Located(f"metrics is {metrics!r}; a list of some of {', '.join(MORE)} is needed, each once.", "metrics")
    return tuple(metrics)


def _runs(experiments: Iterable[Mapping[str, Any]]) -> list[Planned]:
    """Return the runs of all experiments, each once."""
    found: dict[str, Planned] = {}
    groups: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, entry in enumerate(experiments):
        try:
            own, runs = _planned(entry)
        except WhenceError as wrong:
            place = wrong.place if isinstance(wrong, _Located) else _spoken_of(entry, str(wrong))
            raise _Located(str(wrong), "experiment", number, *place) from wrong
        _, settings = groups.setdefault(entry["name"], (number, {}))
        if others := find_differences(settings, own.arm, own):
            said = ", ".join("the share that the preset drops" if name == "drop" else name for name in others)
            key = next((key for key in (others[0], "preset", "env") if key in entry and key != "drop"), "name")
            raise _Located(
                f"The name {entry['name']!r} stands over runs that differ in {said}; give this experiment another "
                "name.",
                *("experiment", number, key),
            )
        for planned in runs:
            found.setdefault(planned.name, planned)
    for group, (number, _) in groups.items():
        if not any(planned.group == group and planned.config.arm == STANDARD for planned in found.values()):
            raise _Located(
                f"The experiment {group!r} lacks the arm {STANDARD!r}, which the others are measured against. Add it.",
                *("experiment", number, "name"),
            )
    return list(found.values())


def _spoken_of(entry: Mapping[str, Any], said: str) -> tuple[str, ...]:
    """Return the key of an experiment that an error names; else what holds a key or a text that it names."""
    words: list[tuple[int, Any, tuple[str, ...]]] = [(0, key, (key,)) for key in entry]
    for key, value in entry.items():
        if isinstance(value, Mapping):
            words += [(1, inner, (key, inner)) for inner in value] + [(1, text, (key,)) for text in value.values()]
        else:
            words += [(1, text, (key,)) for text in (value if isinstance(value, list) else [value])]
    found = [
        (rank, match.start(), place)
        for rank, word, place in words
        if isinstance(word, str) and word and (match := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said))
    ]
    return min(found)[2] if found else ("name",)


def _planned(entry: Mapping[str, Any]) -> tuple[RunConfig, list[Planned]]:
    """Return a run of an experiment with the experiment's own share to drop, and its runs, seed by seed."""
    if unknown := [key for key in entry if key not in KEYS]:
        raise WhenceError(f"An experiment has no {unknown[0]!r}.{suggest(unknown[0], KEYS)}")
    group = entry.get("name")
    if not isinstance(group, str) or not re.fullmatch(r"\w[\w.-]{0,99}", group):
        raise WhenceError(
            f"The experiment's name is {group!r}; a letter or digit, then letters, digits, '-', '_' and '.', 100 at "
            "most, make a directory of it."
        )
    arms = entry.get("arms")
    is_list = isinstance(arms, list) and all(isinstance(arm, str) for arm in arms)
    if not is_list or not arms or len(set(arms)) < len(arms):
        raise _Located(
            f"arms is {arms!r}; a list that names each arm once is needed. Known: {describe_arms()}.", "arms"
        )
    for place, arm in enumerate(arms):
        if arm not in ARMS:
            raise _Located(str(unknown_arm(arm)), "arms", place)
    preset = entry.get("preset")
    if preset is not None and not isinstance(preset, str):
        raise WhenceError(f"preset is {preset!r}; text is needed.")
    overrides = {name: entry[name] for name in OVERRIDES if name in entry}
    configs = configure_arms(arms, env=entry.get("env"), preset=preset, **overrides)
    check_read(configs, [name for name in READ if name in entry])
    seeds, found = _seeds(entry.get("seeds")), []
    for seed in seeds:
        for own in configs:
            # What an arm does not read would make the same run several times.
            for drop in _shares(entry.get("drop", own.drop)) if reads(own, "drop") else [own.drop]:
                config = replace(replace(own, drop=drop), seed=seed, drop=float(drop))  # refused before it is converted
                found.append(Planned(group, make_label(config, own.drop), config))
    return configs[0], found


def _seeds(given: Any) -> list[int]:
    if type(given) is int and 1 <= given <= 2**32:
        return list(range(given))
    if isinstance(given, list) and given and all(type(seed) is int and 0 <= seed < 2**32 for seed in given):
        if len(set(given)) < len(given):
            raise WhenceError(f"seeds is {given!r}; name each once.")
        return given
    raise WhenceError(
        f"seeds is {given!r}; give how many there are, or a list of them, each 0 or more and of 32 bits at most."
    )


def _shares(given: Any) -> list[int | float]:
    values = given if isinstance(given, list) else [given]
    if not values or any(type(value) not in (int, float) for value in values):
        raise WhenceError(f"drop is {given!r}; a number is needed, or a list of numbers.")
    if len(set(values)) < len(values):
        raise WhenceError(f"drop is {given!r}; name each once.")
    return values
