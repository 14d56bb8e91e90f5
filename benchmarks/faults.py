"""Trainings whose disk fills up or turns read-only, with a second writer, and with a clock that goes back.

`python -m benchmarks.faults` needs the right to mount a small disk (tmpfs). Each training must end with an error that
names the fault, leave a directory that can be read, and go on to the same bits once the fault is gone.
"""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from studies.reliability.kills import append_lines, call_in_child, start
from studies.reliability.worlds import StageBoard, check_readable, find_differences, preload

WORLDS = "FrozenLake", "CartPole, 8 environments, VecNormalize"


@contextmanager
def small_disk(place: Path, kibibytes: int) -> Iterator[Path]:
    """Mount a disk of this size."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, options: str) -> None:
    """Change the options of a mounted disk."""
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def fill_disk(world: str, scratch: Path, draw: random.Random, kibibytes: int) -> tuple[str, Path]:
    """Train on a disk that is too small; then make it larger and train to the end."""
    with small_disk(scratch / "disk", kibibytes) as disk:
        message = expect_failure(world, disk / "run", scratch)
        remount(disk, "size=200m")
        finish(world, disk / "run", scratch)
        shutil.copytree(disk / "run", scratch / "run")
    return message, scratch / "run"


def forbid_writing(world: str, scratch: Path, draw: random.Random, kibibytes: int) -> tuple[str, Path]:
    """Forbid writing to the directory at a random instant of the training; then allow it again."""
    path = scratch / "run"
    message = expect_failure(
        world, path, scratch, lambda: change_modes(path, 0o555), after=draw.randint(1, 4), prepare=obey_modes
    )
    change_modes(path, 0o755)
    finish(world, path, scratch)
    return message, path


def change_modes(path: Path, mode: int) -> None:
    """Change the mode of a directory and of the directories in it."""
    for folder in (path, *(entry for entry in path.iterdir() if entry.is_dir())):
        folder.chmod(mode)


def obey_modes() -> None:
    """Take from this process root's right to write where modes forbid it (CAP_DAC_OVERRIDE), on Linux."""
    version, rights = 0x20080522, (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(version, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, rights):
        raise OSError(ctypes.get_errno(), "capget")
    for place in (0, 1):  # effective and permitted, of the first 32 rights
        rights[place] &= ~(1 << 1)
    if libc.capset(header, rights):
        raise OSError(ctypes.get_errno(), "capset")


def start_twice(world: str, scratch: Path, draw: random.Random, kibibytes: int) -> tuple[str, Path]:
    """Start a second training in the directory of one that runs."""
    board = StageBoard(scratch / "first board")
    first = start(world, scratch / "run", board, scratch / "first log")
    while not list((scratch / "run" / "records").glob("*.parquet")):
        time.sleep(0.01)
    os.kill(first.pid or 0, signal.SIGSTOP)  # else it might end before the second begins
    message = expect_failure(world, scratch / "run", scratch)
    os.kill(first.pid or 0, signal.SIGCONT)
    first.join()
    if first.exitcode:
        raise RuntimeError((scratch / "first log").read_text()[-2000:])
    return message, scratch / "run"


def turn_clock_back(world: str, scratch: Path, draw: random.Random, kibibytes: int) -> tuple[str, Path]:
    """Train with a clock of which every reading lies an hour before the last."""
    now = [time.time()]

    def read_clock() -> float:
        now[0] -= 3600
        return now[0]

    original, time.time = time.time, read_clock
    try:
        finish(world, scratch / "run", scratch)
    finally:
        time.time = original
    return "", scratch / "run"


FAULTS: dict[str, Callable[[str, Path, random.Random, int], tuple[str, Path]]] = {
    "full disk": fill_disk,
    "read-only directory": forbid_writing,
    "second writer": start_twice,
    "clock goes back": turn_clock_back,
}


def expect_failure(
    world: str,
    path: Path,
    scratch: Path,
    act: Callable[[], object] = lambda: None,
    after: int = 0,
    prepare: Callable[[], object] = lambda: None,
) -> str:
    """Train until it fails, and return the last error that it printed.

    Args:
        world: what to train.
        path: the run's directory.
        scratch: a directory for logs.
        act: called while it trains.
        after: the rounds whose records are there when `act` is called.
        prepare: called first in the training's process.
    """
    log = scratch / "log"
    log.unlink(missing_ok=True)
    process = start(world, path, StageBoard(scratch / "board"), log, prepare)
    while len(list((path / "records").glob("*.parquet"))) < after:
        time.sleep(0.002)
    act()
    process.join()
    lines = log.read_text().strip().splitlines() if log.exists() else [""]
    if not process.exitcode:
        raise RuntimeError(f"{world} ended well under a fault")
    if failures := call_in_child(check_readable, path):
        raise RuntimeError(f"{world}: unreadable after {lines[-1]}: {failures}")
    return next(line for line in reversed(lines) if "Error" in line)


def finish(world: str, path: Path, scratch: Path) -> None:
    """Train to the end."""
    log = scratch / "log"
    process = start(world, path, StageBoard(scratch / "board"), log)
    process.join()
    if process.exitcode:
        raise RuntimeError(log.read_text()[-2000:])


def count_kibibytes(path: Path) -> int:
    """Return the size of a run without its page."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.suffix != ".html") // 1024


def main(
    out: Annotated[Path, typer.Argument(help="Where faults.jsonl is written.")] = Path("results/reliability"),
    repeats: Annotated[int, typer.Option(help="Trainings for each fault and world.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the instants.")] = 0,
) -> None:
    """Expose trainings to each fault, and compare them with trainings that were left alone."""
    preload()
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            finish(world, scratch / "reference", scratch)
            size = count_kibibytes(scratch / "reference")
            for name, expose in FAULTS.items():
                draw, lines = random.Random(f"{seed} {world} {name}"), []
                for trial in range(repeats):
                    shutil.rmtree(scratch / "run", ignore_errors=True)
                    message, path = expose(world, scratch, draw, int(size * draw.uniform(0.2, 0.9)))
                    differences = call_in_child(find_differences, path, scratch / "reference")
                    message = message.replace(str(scratch), "...")
                    lines.append(
                        {"world": world, "fault": name, "trial": trial, "message": message, "differences": differences}
                    )
                    typer.echo(f"{world}, {name}: {message[:200]} {differences or 'identical'}")
                append_lines(out / "faults.jsonl", lines)


if __name__ == "__main__":
    typer.run(main)
