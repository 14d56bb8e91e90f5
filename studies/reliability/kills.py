"""Trainings killed at random instants and started again: `python -m studies.reliability.kills`.

Each training is killed several times, each time started again, and in the end compared with one that was left alone.
Half of the kills fall at a random moment of the training, the others inside a stage drawn at random, so that short
stages are hit as often as long ones.
"""

import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.reliability.worlds import (
    STAGES,
    WORLDS,
    StageBoard,
    check_readable,
    find_differences,
    preload,
    train,
)

SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}

_fork = multiprocessing.get_context("fork")
"""Forked from a process that has imported everything and computed nothing, so that a training begins at once."""


def call_in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a forked process: nothing is computed in this one."""
    receiver, sender = _fork.Pipe(duplex=False)
    process = _fork.Process(target=lambda: sender.send(function(*args)))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def start(
    world: str, path: Path, board: StageBoard, log: Path, prepare: Callable[[], object] = lambda: None
) -> multiprocessing.Process:
    """Start a training in a forked process, which first calls `prepare`, with its output in a file."""

    def work() -> None:
        prepare()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        board.enter("start")
        train(world, path, board.enter)

    process = _fork.Process(target=work)
    process.start()
    return process  # type: ignore[return-value]


def measure(world: str, path: Path, scratch: Path) -> tuple[float, dict[str, list[float]]]:
    """Train without an interruption; return the seconds it took, and those of each stage's visits."""
    board = StageBoard(scratch / "board")
    process, begin = start(world, path, board, scratch / "log"), time.monotonic()
    visits: dict[str, list[float]] = defaultdict(list)
    last, since = (board.stage, board.count), begin
    while process.is_alive():
        time.sleep(0.0005)
        if (now := (board.stage, board.count)) != last:
            visits[last[0]].append(time.monotonic() - since)
            last, since = now, time.monotonic()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{world} ended with {process.exitcode}: {(scratch / 'log').read_text()[-2000:]}")
    return time.monotonic() - begin, dict(visits)


def interrupt(
    process: multiprocessing.Process,
    board: StageBoard,
    draw: random.Random,
    seconds: float,
    visits: dict[str, list[float]],
    kind: str,
) -> str | None:
    """Send a signal at a random instant; return the stage that it fell in, or None if the training had ended."""
    if draw.random() < 0.5 or not visits:
        process.join(draw.uniform(0, seconds))
    else:
        stage = draw.choice([name for name in STAGES if name in visits and name != "end"])
        for _ in range(draw.randint(1, 3)):
            while process.is_alive() and board.stage != stage:
                time.sleep(0.0002)
            arrived = board.count
            while process.is_alive() and board.count == arrived and draw.random() < 0.3:
                time.sleep(0.001)
        process.join(draw.uniform(0, draw.choice(visits[stage])))
    if not process.is_alive():
        return None
    if kind == "KILL":
        os.kill(process.pid or 0, signal.SIGSTOP)  # so that the stage is the one it dies in
    stage = board.stage
    os.kill(process.pid or 0, SIGNALS[kind])
    if kind == "KILL":
        os.kill(process.pid or 0, signal.SIGCONT)
    process.join()
    return stage


def run_trial(
    world: str,
    path: Path,
    scratch: Path,
    draw: random.Random,
    seconds: float,
    visits: dict[str, list[float]],
    kind: str,
    most: int,
) -> list[str]:
    """Interrupt a training up to `most` times and let it end; return the stages, with what could not be read after."""
    board, stages = StageBoard(scratch / "board"), []
    while True:
        process = start(world, path, board, scratch / "log")
        if len(stages) < most:
            stage = interrupt(process, board, draw, seconds / (1 + len(stages)), visits, kind)
            if stage is not None:
                stages.append(stage)
                if failures := call_in_child(check_readable, path):
                    raise RuntimeError(f"{world}: unreadable after a kill in {stage}: {failures}")
                continue
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{world} ended with {process.exitcode}: {(scratch / 'log').read_text()[-2000:]}")
        return stages


def main(
    out: Annotated[Path, typer.Argument(help="Where kills.jsonl is written.")] = Path("results/reliability"),
    kills: Annotated[int, typer.Option(help="Kills in all, at least.")] = 210,
    worlds: Annotated[str, typer.Option(help="Trainings, separated by semicolons.")] = ";".join(WORLDS),
    kind: Annotated[str, typer.Option(help=f"The signal: {', '.join(SIGNALS)}.")] = "KILL",
    seed: Annotated[int, typer.Option(help="Of the instants.")] = 0,
) -> None:
    """Interrupt trainings until there are enough kills, and write a line for each training."""
    preload()
    names = worlds.split(";")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for world in names:
            share, number = -(-kills // len(names)), 0
            reference = scratch / "reference"
            shutil.rmtree(reference, ignore_errors=True)
            seconds, visits = measure(world, reference, scratch)
            draw = random.Random(f"{seed} {world} {kind}")
            lines: list[dict[str, Any]] = []
            while sum(len(line["stages"]) for line in lines) < share:
                path = scratch / "run"
                shutil.rmtree(path, ignore_errors=True)
                (scratch / "log").unlink(missing_ok=True)
                stages = run_trial(world, path, scratch, draw, seconds, visits, kind, most=5)
                differences = call_in_child(find_differences, path, reference)
                lines.append(
                    {
                        "world": world,
                        "signal": kind,
                        "seed": seed,
                        "trial": number,
                        "stages": stages,
                        "differences": differences,
                    }
                )
                number += 1
                typer.echo(f"{world}: {Counter(stages)}, {differences or 'identical'}")
            append_lines(out / "kills.jsonl", lines)


def append_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines, each with the machine and the date."""
    about = {"machine": platform.platform(), "date": time.strftime("%Y-%m-%d")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({**line, **about}) + "\n")


if __name__ == "__main__":
    typer.run(main)
