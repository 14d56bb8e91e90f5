"""A run's records for other programs: one Parquet file, JSON lines, or a Rerun recording."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import polars as pl

from whence.errors import Unsupported, WhenceError, first_line
from whence.experiments.rl.rebuilding import AnyEnv
from whence.guards import write_atomically
from whence.moments import Moment, find_moments, name_action
from whence.report.moment_view import choose_frames, find_env, read_window
from whence.runs import RunDirectory

Format: TypeAlias = Literal["parquet", "jsonl", "rerun"]
FORMATS: tuple[Format, ...] = get_args(Format)

_SCALARS = ("score", "error", "advantage", "value", "return", "reward")
_TEXTS = ("prompt", "response")


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        records: the number of records.
        rounds: the rounds that they are of.
        notes: what could not be read or drawn, a sentence each.
    """

    records: int
    rounds: tuple[int, ...]
    notes: tuple[str, ...]


def export_table(run: RunDirectory, path: Path, kind: Format, *, rounds: Sequence[int] = ()) -> Exported:
    """Write the records of a run's rounds to one file, with the column `round` first; memory holds a few rounds.

    Columns that a round lacks are null there. A round that cannot be read is left out, with a note.

    Args:
        run: the run, finished or not.
        path: the file.
        kind: "parquet" or "jsonl".
        rounds: the rounds; empty: all.

    Raises:
        WhenceError: there is no such round, or none can be read.
    """
    readable, notes = _check_rounds(run, rounds)
    if kind == "parquet":
        parts = [_scan(run, number) for number in readable]
        with _explain_columns(), write_atomically(path) as temporary:
            pl.concat(parts, how="diagonal_relaxed").sink_parquet(temporary, compression="zstd")
        records = int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
        return Exported(records, tuple(readable), tuple(notes))
    with _explain_columns():
        schema = pl.concat([_scan(run, number).head(0) for number in readable], how="diagonal_relaxed").collect()
    records = 0
    with _explain_columns(), write_atomically(path) as temporary, temporary.open("wb") as file:
        for number in readable:
            table = pl.concat([schema, _scan(run, number).collect()], how="diagonal_relaxed")
            table.with_columns(pl.col(pl.Float32, pl.Float64).fill_nan(None)).write_ndjson(file)
            records += len(table)
    return Exported(records, tuple(readable), tuple(notes))


@contextmanager
def _explain_columns() -> Iterator[None]:
    """Turn Polars' errors on rounds that do not fit together, or whose records are damaged, into a `WhenceError`."""
    try:
        yield
    except (pl.exceptions.PanicException, pl.exceptions.PolarsError) as refusal:
        raise WhenceError(
            f"The rounds cannot be written to one file: {first_line(refusal)}. The file of one of them was changed: "
            "name the others with --rounds."
        ) from None


def _scan(run: RunDirectory, number: int) -> pl.LazyFrame:
    table = pl.scan_parquet(run.round_path("records", number), glob=False)
    return table.select(pl.lit(number, dtype=pl.Int64).alias("round"), pl.all())


def _check_rounds(run: RunDirectory, rounds: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the rounds whose records can be read, and a note for each that cannot."""
    stored = run.require_rounds(rounds)
    readable, notes = [], []
    for number in rounds or stored:
        try:
            pl.read_parquet_schema(run.round_path("records", number))
        except (pl.exceptions.PanicException, pl.exceptions.PolarsError, OSError) as broken:
            notes.append(f"Round {number} is left out: it cannot be read as Parquet ({first_line(broken)}).")
        else:
            readable.append(number)
    if not readable:
        raise WhenceError(f"There is nothing to export. {notes[0]}")
    return readable, notes


def export_rerun(
    run: RunDirectory, path: Path, *, rounds: Sequence[int] = (), moments: int = 1, env: AnyEnv = None
) -> Exported:
    """Write a Rerun recording (.rrd) with the time lines `round` and `step` (the record's id).

    `records/…` holds scalars of every record, `metrics/…` those of every round, `moments/harmful` and `moments/helpful`
    text and frames of the most extreme moments, `responses/…` what a language model answered.

    Args:
        run: the run, finished or not.
        path: the file.
        rounds: the rounds; empty: all.
        moments: moments at either end of each round, with frames; 0: none.
        env: the environment if the run's configuration does not name it.

    Raises:
        Unsupported: rerun-sdk is not installed.
        WhenceError: there is no such round, or none can be read.
    """
    try:
        import rerun
    except ImportError:
        raise Unsupported("Rerun recordings need rerun-sdk, which is not installed: pip install '.[rerun]'.") from None
    readable, notes = _check_rounds(run, rounds)
    records = 0
    with write_atomically(path) as temporary, _record(rerun, run, temporary) as stream:
        _send_metrics(rerun, stream, run, readable)
        for number in readable:
            table = run.round("records", number)
            records += len(table)
            _send_records(rerun, stream, number, table)
            for lowest in (True, False):
                for rank, moment in enumerate(find_moments(table, lowest=lowest, most=moments), start=1):
                    place = f"moments/{'harmful' if lowest else 'helpful'}/{rank}"
                    note = _send_moment(rerun, stream, run, number, table, moment, place, env)
                    notes += [] if note is None or note in notes else [note]
    return Exported(records, tuple(readable), tuple(notes))


@contextmanager
def _record(rerun: Any, run: RunDirectory, path: Path) -> Iterator[Any]:
    """Yield a stream of its own into a file: the user's recording, if one is open, is not touched."""
    stream = rerun.RecordingStream("whence")
    stream.save(str(path))
    stream.send_recording_name(run.path.name)
    # Wall clock and log order say when this was exported, not when anything happened.
    stream.set_log_time_enabled(False)
    stream.set_log_tick_enabled(False)
    try:
        yield stream
    finally:
        stream.flush()
        stream.disconnect()


def _send_metrics(rerun: Any, stream: Any, run: RunDirectory, rounds: Sequence[int]) -> None:
    metrics = run.table("metrics")
    if metrics.is_empty() or "round" not in metrics.columns:
        return
    metrics = metrics.filter(pl.col("round").is_in(list(rounds)))
    for name, kind in metrics.schema.items():
        if name != "round" and (kind.is_numeric() or kind == pl.Boolean):
            rows = metrics.select("round", pl.col(name).cast(pl.Float64)).drop_nulls()
            _send_column(rerun, stream, f"metrics/{name}", {"round": rows["round"]}, rows[name])


def _send_records(rerun: Any, stream: Any, number: int, table: pl.DataFrame) -> None:
    numbers = [name for name in _SCALARS if name in table.columns and table[name].dtype.is_numeric()]
    for name in numbers:
        rows = table.select("record_id", pl.col(name).cast(pl.Float64)).drop_nulls()
        _send_column(rerun, stream, f"records/{name}", _times(number, rows), rows[name])
    if "keep" in table.columns:
        rows = table.select("record_id", pl.col("keep").cast(pl.Float64)).drop_nulls()
        _send_column(rerun, stream, "records/keep", _times(number, rows), rows["keep"])
    for name in _TEXTS:
        if name in table.columns:
            rows = table.select("record_id", pl.col(name).cast(pl.String)).drop_nulls()
            indexes = [rerun.TimeColumn(line, sequence=times) for line, times in _times(number, rows).items()]
            if len(rows):
                stream.send_columns(f"responses/{name}", indexes, rerun.TextLog.columns(text=rows[name].to_list()))


def _times(number: int, rows: pl.DataFrame) -> dict[str, Any]:
    return {"step": rows["record_id"].to_numpy(), "round": np.full(len(rows), number)}


def _send_column(rerun: Any, stream: Any, name: str, times: dict[str, Any], values: pl.Series) -> None:
    if len(values):
        indexes = [rerun.TimeColumn(line, sequence=np.asarray(numbers)) for line, numbers in times.items()]
        stream.send_columns(name, indexes, rerun.Scalars.columns(scalars=values.to_numpy()))


def _send_moment(
    rerun: Any,
    stream: Any,
    run: RunDirectory,
    number: int,
    table: pl.DataFrame,
    moment: Moment,
    place: str,
    env: AnyEnv,
) -> str | None:
    """Send a moment's text and frames; return why frames are missing, or None."""
    stream.set_time("round", sequence=number)
    stream.set_time("step", sequence=moment.record_id)
    stream.log(
        f"{place}/text", rerun.TextLog(_describe(run, moment, env), level="WARN" if moment.score < 0 else "INFO")
    )
    if moment.episode_id is None or run.config.get("kind") == "language":
        return None
    from whence.experiments.rl.replaying import replay_episode

    window = read_window(table, moment)
    steps = choose_frames(window, moment)
    if not steps:
        return None
    ids = dict(window.select("step", "record_id").iter_rows())
    try:
        replay = replay_episode(run, moment.episode_id, env=env, frames=steps, last_step=max(steps))
    except WhenceError as missing:
        return f"Some frames are missing: {missing}"
    if replay.mismatch is not None:
        return f"Some frames are missing: {replay.mismatch}"
    for step, frame in replay.frames.items():
        stream.set_time("step", sequence=ids[step])
        stream.log(f"{place}/frame", rerun.Image(frame).compress(jpeg_quality=90))
    return replay.frames_note


def _describe(run: RunDirectory, moment: Moment, env: AnyEnv) -> str:
    from whence.experiments.rl.labels import action_labels

    steps = f"steps {moment.first_step}–{moment.last_step}"
    where = "" if moment.step is None else f", episode {moment.episode_id}, {steps}"
    error = "" if moment.error is None else f" ± {moment.error:.2g}"
    action = name_action(moment.action, action_labels(find_env(run, env)))
    advantage = "" if moment.advantage is None else f", advantage {moment.advantage:.3g}"
    return f"record {moment.record_id}{where}: score {moment.score:.3g}{error}, {action}{advantage}"
