"""Runs among many: what is kept of each, a row of results and a row of timings."""

import math
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import polars as pl

from whence import metrics
from whence.errors import RunDirectoryError, WhenceError
from whence.experiments.arms import counts_scoring
from whence.experiments.rl.config import RunConfig, list_evaluated_rounds
from whence.experiments.rowfile import put_row, read_rows
from whence.metrics import Curve
from whence.runs import RunDirectory

KEYS = ("experiment", "label", "seed")
"""What tells the runs of a sweep apart."""

STANDARD_COLUMNS = (
    *("round", "dropped_share", "negative_share", "held_out_gain", "fell_back"),
    *("episode_return", "train/approx_kl", "train/kl", "train/learning_rate", "train/update_scale"),
)
"""Columns of a run's metrics that its results have, as far as the run has them."""

EXTRA_COLUMNS = (
    *("kept", "mean", "train/entropy_loss", "train/clip_fraction", "train/policy_gradient_loss", "train/value_loss"),
    *("train/explained_variance", "train/update_scale_value"),
)
"""Columns that results have if a sweep asks for them: nearly all runs have them, and most studies read none."""


def make_curve(config: RunConfig, evaluations: pl.DataFrame, timings: pl.DataFrame) -> Curve:
    """Return a run's learning curve and its seconds (process CPU) a round.

    Between evaluations the curve stays at the last one, and reaches nothing.
    """
    seconds = timings["collection_cpu"] + timings["optimisation_cpu"]
    if counts_scoring(config.arm):
        seconds = seconds + timings["scoring_cpu"]
    return metrics.make_curve(config.rounds, evaluations, seconds.to_numpy())


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A finished run of a sweep: configuration, tables `evaluations`, `rounds`, `seconds`, and learning curve."""

    config: RunConfig
    tables: Mapping[str, pl.DataFrame]
    curve: Curve


@dataclass(frozen=True)
class CurveFiles:
    """The two files of a sweep's finished runs, with a row for each run, by experiment, label and seed.

    Attributes:
        results: what can be reproduced: configuration, evaluations, and what happened each round.
        timings: what cannot: microseconds, versions and the machine.
    """

    results: Path
    timings: Path

    @classmethod
    def of_sweep(cls, out: Path) -> Self:
        """Return the files in a sweep's directory."""
        return cls(out / "curves.parquet", out / "timings.parquet")

    def write(
        self, experiment: str, label: str, config: RunConfig, run: RunDirectory, *, more: Collection[str] = ()
    ) -> None:
        """Put a finished run's two rows, that of the timings first: a run is there when its results are.

        Args:
            experiment: the experiment's name.
            label: the run's label in its experiment.
            config: the run.
            run: its directory.
            more: columns of `EXTRA_COLUMNS` to write as well; null if the run has none.

        Raises:
            RunDirectoryError: the directory does not hold the whole run, and nothing was written; or a file that is
                there is damaged.
        """
        head = {"experiment": experiment, "label": label, "seed": config.seed}
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
        timings = head | {
            "machine": f"{machine}, Python {platform.python_version()}",
            "versions": dict(run.versions),
            "microseconds": _list_columns(_to_microseconds(run.table("timings"))),
        }
        results = head | {
            "config": config.to_json(),
            "evaluations": _list_columns(run.table("evaluations")),
            "rounds": _list_columns(_select_metrics(run.table("metrics"), more)),
        }
        try:
            _parse_run(results, timings)
        except _BROKEN as failure:
            raise RunDirectoryError(
                f"{run.path} does not hold a whole run ({_describe(failure)}). Change its settings, or delete it to "
                "have it made again."
            ) from failure
        put_row(self.timings, timings, KEYS)
        put_row(self.results, results, KEYS)

    def read(self) -> dict[tuple[str, str, int], KeptRun]:
        """Return the finished runs by experiment, label and seed; none if there is no file.

        Raises:
            RunDirectoryError: a row is missing, is none that `write` wrote, or lacks some of the run.
        """
        results, timings = read_rows(self.results, KEYS), read_rows(self.timings, KEYS)
        runs: dict[Any, KeptRun] = {}
        for key, row in results.items():
            name = "{}/{}/seed_{}".format(*key)
            try:
                runs[key] = _parse_run(row, timings[key])
            except _BROKEN as failure:
                reason = f"{self.timings} lacks it" if key not in timings else _describe(failure)
                raise RunDirectoryError(
                    f"{self.results} does not hold a whole run {name} ({reason}). Delete both files' row of it, and "
                    "the run is made again."
                ) from failure
        return runs


_BROKEN = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    pl.exceptions.PolarsError,
)
"""What contents raise that are not a finished run's."""


def _describe(failure: Exception) -> str:
    return str(failure).rstrip(".") if isinstance(failure, WhenceError) else f"{type(failure).__name__}: {failure}"


def _select_metrics(table: pl.DataFrame, more: Collection[str]) -> pl.DataFrame:
    present = [name for name in (*STANDARD_COLUMNS, *more) if name in table.columns]
    return table.select(*present, *(pl.lit(None).alias(name) for name in more if name not in present))


def _parse_run(results: Mapping[str, Any], timings: Mapping[str, Any]) -> KeptRun:
    """Return what the two lines of a run hold, checked to be a whole run."""
    config = RunConfig.from_json(results["config"])
    if config.seed != results["seed"]:
        raise WhenceError(f"its line has seed {results['seed']}, and its configuration {config.seed}")
    columns = {"evaluations": results["evaluations"], "rounds": results["rounds"], "seconds": timings["microseconds"]}
    tables = {name: pl.DataFrame(table) for name, table in columns.items()}
    tables["seconds"] = tables["seconds"].with_columns(pl.exclude("round") / 1e6)
    # First, since no list of rounds is made that the file does not hold.
    if tables["seconds"].height != config.rounds:
        raise WhenceError(f"seconds has {tables['seconds'].height} rows, and the run {config.rounds} rounds")
    each = list(range(1, config.rounds + 1))
    for name, expected in (("evaluations", list_evaluated_rounds(config)), ("rounds", each), ("seconds", each)):
        if tables[name]["round"].to_list() != expected:
            raise WhenceError(f"the rounds of {name} are not those of the run, each once and in order")
    return KeptRun(config, tables, make_curve(config, tables["evaluations"], tables["seconds"]))


def _to_microseconds(timings: pl.DataFrame) -> pl.DataFrame:
    """Return seconds as whole microseconds, which need a third of the room and are as good."""
    return timings.with_columns((pl.exclude("round") * 1e6).round().cast(pl.Int64))


def _list_columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    """Return a table's columns as numbers: null for what is not finite, 1 and 0 for true and false."""
    numbers = table.with_columns(pl.col(pl.Boolean).cast(pl.UInt8))
    return {
        name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in column]
        for name, column in numbers.to_dict().items()
    }
