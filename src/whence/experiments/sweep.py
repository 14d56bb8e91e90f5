"""Many comparisons from one file: environments, arms, shares to drop and seeds."""

import re
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from whence.errors import RunDirectoryError, WhenceError, nearest
from whence.experiments.arms import ARMS, STANDARD
from whence.experiments.config import RunConfig
from whence.experiments.curves import read_curve, write_curve
from whence.experiments.metrics import Curve, summarise
from whence.experiments.plan import check_read, configure_arms, reads
from whence.experiments.workers import check_workers, run_all
from whence.runs import RunDirectory

OVERRIDES = tuple(field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed", "drop"))
"""Fields of a run that a sweep may set for all of an experiment's runs."""

KEYS = ("name", "preset", "env", "arms", "seeds", "drop", *OVERRIDES)
"""What an [[experiment]] of a sweep file may say."""


@dataclass(frozen=True, eq=False)  # its configuration holds dicts, which have no hash
class Planned:
    """One run of a sweep.

    Attributes:
        group: the experiment's name; runs of one group differ in arm, share to drop and seed only.
        label: the arm's name, with the share where it is not the group's own: "iif", "iif-drop0.25".
        config: the run.
    """

    group: str
    label: str
    config: RunConfig

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


class Watch(Protocol):
    """Told how a sweep goes."""

    def kept(self, planned: Planned) -> None:
        """Hear of a run that was finished before."""

    def rounds(self, planned: Planned, done: int) -> None:
        """Hear of the rounds that a run under way has done."""

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Hear that a run has ended, and why it failed."""


def read_sweep(path: Path) -> list[Planned]:
    """Return the runs of a sweep file, in its order, seed by seed. All of it is checked here.

    ```toml
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
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (FileNotFoundError, IsADirectoryError):
        raise WhenceError(f"{path} is not there. Write a sweep file; docs/command.md shows one.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise WhenceError(f"{path} is not TOML: {wrong}.") from None
    places = _places(text)
    found: dict[tuple[str, str, int], Planned] = {}
    groups: dict[str, RunConfig] = {}
    try:
        for entry, where in zip(_experiments(document, text), places, strict=True):
            for planned in _at_line(where, entry, _planned):
                first = groups.setdefault(planned.group, planned.config)
                if differing := _differing(first, planned.config):
                    raise _Located(
                        f"The name {planned.group!r} stands over runs that differ in {', '.join(differing)}; give this "
                        "experiment another name.",
                        where.get(differing[0], where["name"]),
                    )
                found.setdefault((planned.group, planned.label, planned.config.seed), planned)
    except _Located as wrong:
        raise WhenceError(f"{path}, line {wrong.line}: {wrong}") from wrong.__cause__
    for group in groups:
        if not any(planned.group == group and planned.config.arm == STANDARD for planned in found.values()):
            line = next(
                where["name"]
                for entry, where in zip(document["experiment"], places, strict=True)
                if entry["name"] == group
            )
            raise WhenceError(
                f"{path}, line {line}: the experiment {group!r} lacks the arm {STANDARD!r}, which the others are "
                "measured against. Add it."
            )
    return list(found.values())


class _Located(WhenceError):
    """A line of a sweep file that is wrong."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.line = line


def _places(text: str) -> list[dict[str, int]]:
    """Return, for each [[experiment]], the lines of its keys; "name" is its first line where it has none."""
    found: list[dict[str, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"\s*\[\[\s*experiment\s*\]\]", line):
            found.append({"name": number})
        elif found and (key := re.match(r'\s*["\']?([\w.-]+)["\']?\s*=', line)):
            found[-1][key[1].rpartition(".")[2]] = number
    return found


def _experiments(document: Mapping[str, Any], text: str) -> list[Mapping[str, Any]]:
    def line_of(key: str) -> int:
        pattern = re.compile(rf"\s*(\[\[?\s*)?[\"']?{re.escape(key)}\b")
        return next((number for number, line in enumerate(text.splitlines(), start=1) if pattern.match(line)), 1)

    if unknown := [key for key in document if key != "experiment"]:
        raise _Located(f"A sweep has no {unknown[0]!r}; it is made of [[experiment]] tables.", line_of(unknown[0]))
    experiments = document.get("experiment", [])
    if not isinstance(experiments, list) or not experiments:
        raise _Located(
            "There is no [[experiment]] (in two pairs of brackets), so nothing to run.", line_of("experiment")
        )
    return experiments


def _at_line(
    where: Mapping[str, int], entry: Mapping[str, Any], make: Callable[[Mapping[str, Any]], list[Planned]]
) -> list[Planned]:
    """Return the runs of an experiment; an error names the line of the key that it speaks of."""
    try:
        return make(entry)
    except WhenceError as wrong:
        said = str(wrong)
        words = [(key, where[key]) for key in where] + [
            (word, where[key]) for key, word in _words(entry) if key in where
        ]
        found = [
            (place.start(), line)
            for word, line in words
            if (place := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said))
        ]
        raise _Located(said, min(found)[1] if found else where["name"]) from wrong


def _words(entry: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Return the texts in an experiment's values, and the keys of its tables, each with the key it stands under."""
    for key, value in entry.items():
        inside = (
            [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        )
        yield from ((key, word) for word in inside if isinstance(word, str) and word)


def _planned(entry: Mapping[str, Any]) -> list[Planned]:
    if unknown := [key for key in entry if key not in KEYS]:
        raise WhenceError(f"An experiment has no {unknown[0]!r}.{nearest(unknown[0], KEYS)}")
    group = entry.get("name")
    if not isinstance(group, str) or not re.fullmatch(r"[\w.-]+", group):
        raise WhenceError(
            f"The experiment's name is {group!r}; letters, digits, '-', '_' and '.' make a directory of it."
        )
    arms = entry.get("arms")
    if not isinstance(arms, list) or not arms or len(set(map(str, arms))) < len(arms):
        raise WhenceError(f"arms is {arms!r}; a list that names each arm once is needed. Known: {', '.join(ARMS)}.")
    for arm in arms:
        if arm not in ARMS:
            raise WhenceError(f"The arm {arm!r} is unknown.{nearest(str(arm), ARMS)}")
    overrides = {name: entry[name] for name in OVERRIDES if name in entry}
    try:
        configs = configure_arms(arms, env=entry.get("env"), preset=entry.get("preset"), **overrides)
        check_read(configs, [name for name in ("drop", "warmup") if name in entry])
        found = []
        for seed in _seeds(entry.get("seeds")):
            for own in configs:
                drops = _list("drop", entry.get("drop", own.drop), (int, float))
                # What an arm does not read would make the same run several times.
                for drop in drops if reads(own, "drop") else [own.drop]:
                    label = own.arm if drop == own.drop else f"{own.arm}-drop{drop:g}"
                    found.append(Planned(group, label, replace(own, seed=seed, drop=float(drop))))
    except (TypeError, AttributeError) as wrong:  # a value of another type than the field's
        raise WhenceError(f"A value of the experiment {group!r} has the wrong type: {wrong}.") from wrong
    return found


def _seeds(given: Any) -> list[int]:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        return list(range(given))
    if isinstance(given, list) and given and all(isinstance(seed, int) and seed >= 0 for seed in given):
        return _list("seeds", given, (int,))
    raise WhenceError(f"seeds is {given!r}; give how many there are, or a list of them, each 0 or more.")


def _list(name: str, given: Any, types: tuple[type, ...]) -> list[Any]:
    values = given if isinstance(given, list) else [given]
    if not values or any(not isinstance(value, types) or isinstance(value, bool) for value in values):
        raise WhenceError(f"{name} is {given!r}; a number is needed, or a list of numbers.")
    if len(set(values)) < len(values):
        raise WhenceError(f"{name} is {given!r}; name each once.")
    return values


def _differing(first: RunConfig, other: RunConfig) -> list[str]:
    same = replace(other, arm=first.arm, seed=first.seed, drop=first.drop)
    return [name for name, value in vars(same).items() if value != vars(first)[name]]


def sweep(
    runs: Sequence[Planned], out: Path, watch: Watch, *, workers: int | None = None, keep_runs: bool = False
) -> dict[str, str]:
    """Run what is not there yet, and keep of each run its curve and its timings.

    Finished runs are skipped. A run that fails is told of, and the others go on. Killed at any moment, the sweep goes
    on at the first run without a curve.

    Args:
        runs: from `read_sweep`.
        out: the directory: `curves/NAME/ARM/seed_S.json`, `timings/...`; and `runs/...` of those under way.
        watch: told how it goes.
        workers: runs at a time, each in a process with one torch thread; None: one per core.
        keep_runs: keep the run directories also of finished runs, with every round's records and policies.

    Returns:
        Why runs failed, by "NAME/ARM/seed_S".

    Raises:
        RunDirectoryError: the directory holds another run where one of these belongs; nothing was run.
        WhenceError: fewer than one worker.
    """
    check_workers(workers)
    todo = []
    for planned in runs:
        if _is_kept(planned, out):
            watch.kept(planned)
        else:
            todo.append(planned)
    failures = {}
    jobs = [(planned.config, planned.run_path(out)) for planned in todo]
    for place, failure in run_all(jobs, workers, lambda place, done: watch.rounds(todo[place], done)):
        planned, (config, path) = todo[place], jobs[place]
        if failure is None:
            files = planned.file(out, "curves"), planned.file(out, "timings")
            write_curve(config, RunDirectory.open(path), *files)
            if not keep_runs:
                shutil.rmtree(path)
        else:
            failures[planned.name] = failure
        watch.ended(planned, failure)
    return failures


def _is_kept(planned: Planned, out: Path) -> bool:
    results = planned.file(out, "curves")
    if not results.exists():
        return False
    config, _, _ = read_curve(results, planned.file(out, "timings"))
    if differing := [name for name, value in vars(config).items() if value != vars(planned.config)[name]]:
        before, now = (vars(one)[differing[0]] for one in (config, planned.config))
        raise RunDirectoryError(
            f"{results} is of another run: its {differing[0]} is {before!r}, the sweep's {now!r}. Choose another "
            "directory, or delete the file."
        )
    return True


@dataclass(frozen=True, eq=False)
class Kept:
    """A run of a sweep, as its files hold it: configuration, tables `evaluations`, `rounds`, `seconds`, and curve."""

    config: RunConfig
    tables: Mapping[str, pl.DataFrame]
    curve: Curve


Results = Mapping[str, Mapping[str, Mapping[int, Kept]]]
"""Finished runs by group, label and seed."""


def load_sweep(out: Path) -> Results:
    """Return the finished runs below a sweep's directory.

    Raises:
        WhenceError: there is none, or a file cannot be read.
    """
    found: dict[str, dict[str, dict[int, Kept]]] = {}
    for results in sorted((out / "curves").glob("*/*/seed_*.json")):
        group, label = results.parts[-3:-1]
        config, tables, curve = read_curve(results, out / "timings" / group / label / results.name)
        found.setdefault(group, {}).setdefault(label, {})[config.seed] = Kept(config, tables, curve)
    if not found:
        raise WhenceError(f"{out} holds no finished run of a sweep. Run whence sweep FILE --out {out}.")
    order = {arm: place for place, arm in enumerate(ARMS)}
    return {
        group: dict(sorted(labels.items(), key=lambda item: _place(item[1], order))) for group, labels in found.items()
    }


def _place(runs: Mapping[int, Kept], order: Mapping[str, int]) -> tuple[int, float]:
    config = next(iter(runs.values())).config
    return order[config.arm], config.drop


def summarise_sweep(results: Results) -> dict[str, Any]:
    """Return the summary of every group that holds the standard arm: `{group: {label: {metric: entry}}}`.

    Entries are those of `summarise`; an arm's seeds need not be as many as the standard's.
    """
    return {
        group: summarise(
            {label: {seed: kept.curve for seed, kept in runs.items()} for label, runs in labels.items()},
            standard=STANDARD,
        )
        for group, labels in results.items()
        if STANDARD in labels
    }
