"""Scripts of the tests in several processes, and what runs in one instead."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from whence.core import WhenceError, preserve_rng_state


def run_script(launcher: Sequence[str], script: str, folder: Path, **environment: str) -> None:
    """Run a script of helpers/scripts on CPUs, by a launcher's module if any; it writes to the folder, its argument."""
    module = ["-m", *launcher] if launcher else []
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])  # for the helpers
    done = subprocess.run(
        [sys.executable, *module, str(here / "scripts" / script), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {"ACCELERATE_USE_CPU": "1"})},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


def fork_second() -> None:
    """Go on in two processes that find each other, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    rank = 0 if os.fork() else 1
    os.environ |= {**address, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}


def end_process() -> None:
    """End a script's process at once: threads of gloo sometimes abort an interpreter that winds itself up."""
    if dist.is_initialized():
        dist.barrier()  # none may leave while another still waits for what it sent
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Recorder:
    """A watch that takes note of what is reported of each run."""

    def __init__(self):
        self.skipped, self.reports, self.ends = [], [], {}

    def kept(self, planned):
        self.skipped.append(planned.name)

    def rounds(self, planned, done):
        self.reports.append((planned.name, done))

    def ended(self, planned, failure):
        self.ends[planned.name] = failure


def run_one_by_one(jobs, workers, on_round):
    """What `whence.lab.workers.run_all` does, in this process."""
    from whence.lab import runner_of

    for place, (config, path) in enumerate(jobs):
        try:
            with preserve_rng_state():
                runner_of(config).run(config, path, lambda rounds, metrics, place=place: on_round(place, rounds))
        except WhenceError as failure:
            yield place, str(failure)
        else:
            yield place, None
