"""Scores of 100,000 rollouts in one file, killed in the middle and begun again: seconds, the most memory, same scores.

Run: `python -m studies.benchmarks.streams results/benchmarks/streams.parquet [--rows 100000]`. It writes the rollouts
of a model of one million parameters to a file of JSON lines without steps, and scores them by `whence llm score` twice
at a time: one process is killed (SIGKILL) after half of the rounds, and another one goes on; one runs through. Memory
is the most that a process has resident, by the kernel's count, Python and torch included. In half of the groups all
rewards are equal: their rows have no signal, and need no pass.
"""

import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import polars as pl
import typer

from studies.shared import Row, write_line
from whence import RunDirectory
from whence.llm.lab.laboratory import Settings, make_character_tokenizer, make_model
from whence.llm.lab.problems import SYMBOLS

SETTINGS = Settings(hidden=128, layers=5, intermediate=384)
GROUP, EQUAL, ROUND, BATCH = 8, 0.5, 4096, 128
"""Responses to a prompt, the share of groups with equal rewards, and rows of a round and of a pass."""


def write_rollouts(file: Path, rows: int) -> None:
    """Write sums with eight answers each, of which some are one too large; a share has equal rewards."""
    generator = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(-(-rows // GROUP)):
            a, b = divmod(number, 200)
            wrong = 0 if generator.random() < EQUAL else generator.randrange(1, GROUP)
            for slip in (int(place < wrong) for place in range(GROUP)):
                row = {"prompt": f"{a}+{b}?", "response": str(a + b + slip), "reward": 1.0 - slip}
                lines.write(json.dumps(row) + "\n")


def start(folder: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start a process that scores the rollouts."""
    command = [sys.executable, "-m", "whence.cli", "llm", "score", str(folder / "rollouts.jsonl")]
    command += ["--model", str(folder / "model"), "--batch-size", str(BATCH), "--run", str(run)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait(process: subprocess.Popen[bytes], signal_number: int = 0) -> Row:
    """Wait for the end by a signal, or a good one; return seconds of the processor, and the most MiB."""
    _, status, usage = os.wait4(process.pid, 0)
    if (code := os.waitstatus_to_exitcode(status)) != -signal_number:
        raise SystemExit(f"{process.args} ended with status {code}.")
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}


def read_scores(run: Path) -> pl.DataFrame:
    """Return record ids and scores of all rounds."""
    directory = RunDirectory.open(run)
    return pl.concat(directory.round("records", number).select("record_id", "score") for number in directory.rounds())


def measure(folder: Path, rows: int) -> Row:
    """Return what scoring some rollouts took."""
    tokenizer = make_character_tokenizer(SYMBOLS)
    model = make_model(tokenizer, SETTINGS, 32, 0)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    write_rollouts(folder / "rollouts.jsonl", rows)
    whole, broken, began = folder / "whole", folder / "broken", time.perf_counter()
    through, first = start(folder, whole), start(folder, broken)
    half, metrics = max(1, -(-rows // ROUND) // 2), broken / "metrics.parquet"
    while not metrics.exists() or len(pl.read_parquet(metrics)) < half:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    killed = wait(first, signal.SIGKILL)
    killed_after = len(RunDirectory.open(broken).table("metrics"))
    resumed, entire = wait(start(folder, broken)), wait(through)
    scores, expected = read_scores(broken), read_scores(whole)
    return {
        "rows": len(expected),
        "rounds": len(RunDirectory.open(whole).table("metrics")),
        "killed_after": killed_after,
        "parameters": model.num_parameters(),
        "equal": EQUAL,
        "same_scores": scores.equals(expected),
        "scores_not_zero": int((expected["score"] != 0).sum()),
        **{"seconds": time.perf_counter() - began, **entire},
        "peak_mib_killed": killed["peak_mib"],
        "peak_mib_resumed": resumed["peak_mib"],
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def main(
    out: Annotated[Path, typer.Argument(help="The file of results.")] = Path("results/benchmarks/streams.parquet"),
    rows: Annotated[int, typer.Option(help="Rollouts in the file.", min=2 * GROUP)] = 100_000,
) -> None:
    """Measure, and write a line."""
    with tempfile.TemporaryDirectory() as folder:
        line = measure(Path(folder), rows)
    write_line(out, line, ("rows", "equal"))
    print(line)


if __name__ == "__main__":
    typer.run(main)
