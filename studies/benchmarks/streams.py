"""Scores of 100,000 rollouts in one file, killed in the middle and begun again: seconds, the most memory, same scores.

Run: `python -m studies.benchmarks.streams results/benchmarks/streams.parquet [--rows 100000]`. It writes the rollouts
of a model of one million parameters to a file of JSON lines without steps, and scores them by `whence llm score` twice
at a time: one process is killed (SIGKILL) after half of the rounds, and another one goes on; one runs through. Memory
is the most that a process has resident, by the kernel's count, Python and torch included. In a share of the groups,
`--equal`, all rewards are equal: their rows have no signal, and need no pass.
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
from typing import Annotated, Any

import polars as pl
import typer

from studies.shared import write_line
from whence import RunDirectory
from whence.lab.language.laboratory_tasks import Settings, make_character_tokenizer, make_model
from whence.lab.language.problems import SYMBOLS

SETTINGS = Settings(hidden=128, layers=5, intermediate=384)
GROUP = 8
"""Responses to a prompt."""


def write_rollouts(file: Path, rows: int, equal: float) -> None:
    """Write sums with eight answers each, of which some are one too large; a share `equal` has equal rewards."""
    generator = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(-(-rows // GROUP)):
            a, b = divmod(number, 200)
            wrong = 0 if generator.random() < equal else generator.randrange(1, GROUP)
            for place in range(GROUP):
                slip = int(place < wrong)
                row = {"prompt": f"{a}+{b}?", "response": str(a + b + slip), "reward": 1.0 - slip}
                lines.write(json.dumps(row) + "\n")


class Scoring:
    """A process that scores; a run directory's rounds tell when to kill it."""

    def __init__(self, command: list[str], run: Path) -> None:
        self.run, self._start = run, time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([*command, str(run)], stdout=subprocess.DEVNULL, env=environment)

    def kill_after(self, rounds: int) -> None:
        """Kill the process when it has written some rounds, in the middle of the next."""
        metrics = self.run / "metrics.parquet"
        while not metrics.exists() or len(pl.read_parquet(metrics)) < rounds:
            time.sleep(0.05)
        self._process.send_signal(signal.SIGKILL)

    def wait(self, signal_number: int = 0) -> dict[str, float]:
        """Wait for the end by a signal, or a good one; return seconds, those of the processor, and the most MiB."""
        _, status, usage = os.wait4(self._process.pid, 0)
        if (code := os.waitstatus_to_exitcode(status)) != -signal_number:
            raise SystemExit(f"The process of {self.run} ended with status {code}.")
        seconds, cpu_seconds = time.perf_counter() - self._start, usage.ru_utime + usage.ru_stime
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": usage.ru_maxrss / 1024}


def read_scores(run: Path) -> pl.DataFrame:
    """Return record ids and scores of all rounds."""
    directory = RunDirectory.open(run)
    return pl.concat(directory.round("records", number).select("record_id", "score") for number in directory.rounds())


def measure(folder: Path, rows: int, equal: float, batch_size: int) -> dict[str, Any]:
    """Return what scoring some rollouts took."""
    tokenizer = make_character_tokenizer(SYMBOLS)
    model = make_model(tokenizer, SETTINGS, 32, 0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rollouts(folder / "rollouts.jsonl", rows, equal)
    command = [sys.executable, "-m", "whence.cli", "llm", "score", str(folder / "rollouts.jsonl")]
    command += ["--model", str(folder / "model"), "--batch-size", str(batch_size), "--run"]
    rounds = -(-rows // 4096)
    whole, first = Scoring(command, folder / "whole"), Scoring(command, folder / "broken")
    first.kill_after(max(1, rounds // 2))
    killed = first.wait(signal.SIGKILL)
    killed_after = len(RunDirectory.open(first.run).table("metrics"))
    resumed, through = Scoring(command, first.run).wait(), whole.wait()
    scores, expected = read_scores(first.run), read_scores(whole.run)
    return {
        "rows": len(expected),
        "rounds": len(RunDirectory.open(whole.run).table("metrics")),
        "killed_after": killed_after,
        "parameters": model.num_parameters(),
        "equal": equal,
        "same_scores": scores.equals(expected),
        "scores_not_zero": int((expected["score"] != 0).sum()),
        **through,
        "peak_mib_killed": killed["peak_mib"],
        "peak_mib_resumed": resumed["peak_mib"],
    }


def main(
    out: Annotated[Path, typer.Argument(help="The file of results.")] = Path("results/benchmarks/streams.parquet"),
    rows: Annotated[int, typer.Option(help="Rollouts in the file.", min=2 * GROUP)] = 100_000,
    equal: Annotated[float, typer.Option(help="The share of groups with equal rewards.", min=0.0, max=1.0)] = 0.5,
    batch_size: Annotated[int, typer.Option(help="Rows of a pass.", min=1)] = 128,
) -> None:
    """Measure, and write a line."""
    with tempfile.TemporaryDirectory() as folder:
        line = measure(Path(folder), rows, equal, batch_size)
    line["machine"] = platform.processor() or platform.machine()
    line["cores"] = len(os.sched_getaffinity(0))
    write_line(out, line, ("rows", "equal"))
    print(line)


if __name__ == "__main__":
    typer.run(main)
