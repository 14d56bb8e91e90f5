"""The runs whose pages are measured: one that was trained, and larger ones made of its rounds."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

from whence.runs import RunDirectory

TRAINING = (
    *("train", "LunarLander-v3", "--selection", "iif", "--drop", "0.125"),
    *("--rounds", "150", "--record-rounds", "10-150:10", "--seed", "0"),
)
"""Arguments of the command whence by which the run is made, without its directory."""

EPISODES = 1000
"""More episodes than any round of the trained run has."""


def call_whence(*arguments: str) -> None:
    """Run the command whence in a process of its own."""
    subprocess.run([sys.executable, "-m", "whence.cli", *arguments], check=True)


@contextmanager
def serve_page(run: Path) -> Iterator[str]:
    """Yield the address at which `whence view` serves a run, with advantages measured as by default."""
    command = [sys.executable, "-m", "whence.cli", "view", str(run), "--no-browser", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split(" ")[0].strip()
        if not address:
            raise SystemExit(f"{' '.join(command)} ended before it answered.")
        yield address
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def tile_run(source: RunDirectory, path: Path, *, rounds: int, records: int) -> None:
    """Write a run whose rounds repeat those of another; every record and episode has an id of its own.

    Args:
        source: a run with records, metrics, and a policy for each round.
        path: the new run's directory, which must not be there.
        rounds: of the new run.
        records: of each of its rounds.
    """
    numbers = source.rounds()
    tables = [source.round("records", number) for number in numbers]
    run = RunDirectory.create(
        path, {**source.config, "experiment": {**source.experiment, "rounds": rounds}}, versions=source.versions
    )
    (path / "policies").mkdir()
    part = 0
    for number in range(1, rounds + 1):
        parts: list[pl.DataFrame] = []
        while sum(map(len, parts)) < records:
            parts.append(number_episodes(tables[part % len(tables)], part * EPISODES))
            part += 1
        first = (number - 1) * records
        ids = pl.Series("record_id", np.arange(first, first + records))
        run.write_round("records", number, pl.concat(parts).head(records).with_columns(ids))
    for number in range(1, rounds + 2):  # the trained policy follows the last round
        policy = f"policies/round_{numbers[(number - 1) % len(numbers)]:05d}.safetensors"
        shutil.copyfile(source.path / policy, path / f"policies/round_{number:05d}.safetensors")
    metrics = source.table("metrics")
    places = [place % len(metrics) for place in range(rounds)]
    numbered = pl.Series("round", np.arange(1, rounds + 1))
    metrics[places].with_columns(numbered).write_parquet(path / "metrics.parquet")


def number_episodes(records: pl.DataFrame, first: int) -> pl.DataFrame:
    """Return records whose episodes are numbered in their order from `first` on."""
    episode = pl.col("episode_id")
    return records.with_columns(episode.rank("dense").cast(pl.Int64) - 1 + first)


def choose_record(records: pl.DataFrame, generator: np.random.Generator, *, late: bool) -> int:
    """Return the id of a record of a round: any of them, or the one that is latest in its episode."""
    row = int(records["step"].arg_max() or 0) if late else int(generator.integers(len(records)))
    return int(records["record_id"][row])
