"""Runs in processes of this machine, or as tasks of a Ray cluster, with the files that travel to and from its nodes."""

import importlib.util
import logging
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from whence.core import RunDirectoryError, Unsupported, WhenceError, explain_write_errors, first_line, flush_to_disk
from whence.lab.plans import read_config, runner_of
from whence.lab.workers import Job, OnJobRound, describe_failure, note_failure, run_all
from whence.runs import LOCK, SIGNATURE, RunDirectory, list_checkpoints
from whence.stored.language import LanguageConfig

RETRIES = 3
"""How often a run is started again after its node or its process was lost."""

SAVE_SECONDS = 60.0
"""Seconds from one copy of an unfinished run to the next, which is sent home: what a lost node costs at most."""

ENDING_SECONDS = 10.0
"""How long runs under way have, at Ctrl-C, to leave nothing on their nodes."""

_ANSWER_SECONDS, _POLL_SECONDS = 10.0, 0.2

log = logging.getLogger("whence")


def check_start(workers: int | None, on: str) -> None:
    """Refuse a number of workers or a place that cannot be, before anything else is done."""
    if workers is not None and workers < 1:
        raise WhenceError(f"workers is {workers}; at least 1 is needed.")
    if on not in ("local", "ray"):
        raise WhenceError(
            f"on is {on!r}; local or ray is needed. docs/guide/scale.md tells how Ray runs on Slurm and Kubernetes."
        )
    if on == "ray" and importlib.util.find_spec("ray") is None:
        raise Unsupported(
            "on='ray' (--on ray) needs Ray, which is not installed: in whence's source tree, pip install '.[ray]'."
        )


@contextmanager
def start_jobs(
    jobs: Sequence[Job], workers: int | None, on: str, on_round: OnJobRound
) -> Iterator[Iterator[tuple[int, str | None]]]:
    """Yield an iterator that runs jobs, in processes or on a Ray cluster; what is under way at the end is broken off.

    It yields places in `jobs`, each with None or a sentence that says what went wrong. No job is touched before its
    first item, so that a caller may make room for them once there is a cluster; a finished run is left as it is.
    `workers` are runs at a time; None: as many as there is room for. Processes of this machine are those of `run_all`.

    The cluster is the one that this process is connected to, or that RAY_ADDRESS names; otherwise Ray is started on
    this machine, and ended afterwards. A run has a process of its own with one torch thread, and a GPU if its device is
    one, or if it trains a language model and the cluster has one. In a cluster without a GPU, a run whose device is one
    waits for a node that has one, and a warning says so. A run trains in a temporary directory of its node. Its files
    come home once a minute and at its end, so that a run whose node is lost goes on where the last copy was made, and
    so does one that the caller broke off.
    """
    if on == "local":
        with closing(run_all(jobs, workers, on_round)) as ends:
            yield ends
        return
    with _connect(workers) as ray, closing(_Dispatch(ray, jobs, workers, on_round).run()) as ends:
        yield ends


@contextmanager
def _connect(workers: int | None) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; a connection that was there before stays."""
    address = os.environ.get("RAY_ADDRESS", "")
    starts_here = address in ("", "local")
    if starts_here:
        # What is started here listens to no other machine and sends no figures. Ray reads this when it is imported.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    was_connected = ray.is_initialized()
    try:
        if not was_connected:
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            if starts_here:
                ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
            else:
                _join(ray, address, quiet)
        yield ray
    finally:
        if not was_connected:
            ray.shutdown()


def _join(ray: Any, address: str, settings: dict[str, Any]) -> None:
    """Connect to a cluster, whose address Ray reads from RAY_ADDRESS."""
    try:
        if address != "auto":  # Ray would wait minutes for an address where nothing answers.
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
        ray.init(**settings)
    except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as refusal:
        raise WhenceError(
            f"No Ray cluster at RAY_ADDRESS={address} lets this process in ({first_line(refusal).rstrip('.')}). "
            "HOST:PORT is needed, or auto, on a machine of a cluster that `ray start` made, with the same Ray and "
            "Python; if the cluster has a token, also RAY_AUTH_MODE=token and that token in ~/.ray/auth_token. "
            "Without RAY_ADDRESS, Ray uses this machine alone."
        ) from None


class _Dispatch:
    """The runs of a cluster, seen from home: the machine that the command was given on."""

    def __init__(self, ray: Any, jobs: Sequence[Job], workers: int | None, on_round: OnJobRound) -> None:
        self._ray, self._jobs, self._workers, self._on_round = ray, jobs, workers, on_round
        # A process for each run, as on one machine. Ray's own retries would start a lost run with the files that it had
        # at first, and newer ones may have come home since.
        self._remote = ray.remote(max_calls=1, max_retries=0)(train_on_node)
        self._waiting = deque(range(len(jobs)))
        self._tasks: dict[Any, int] = {}  # the places of the runs under way
        self._losses: Counter[int] = Counter()

    def run(self) -> Generator[tuple[int, str | None], None, None]:
        """Yield each job as it ends: its place, and why it failed."""
        queue = _make_queue(self._ray)
        try:
            while self._waiting or self._tasks:
                # Ray holds some more than it has room for, so that no node ever waits and a cluster may grow.
                limit = self._workers or max(64, 2 * int(self._ray.cluster_resources().get("CPU", 1)))
                while self._waiting and len(self._tasks) < limit:
                    self._start(self._waiting.popleft(), queue)
                ended, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=_POLL_SECONDS)
                # All that the runs in `ended` sent is in the queue by now. A node that counts as lost may still send.
                for (place, losses), kind, *content in queue.get_nowait_batch(queue.qsize()):
                    if losses == self._losses[place] and kind == "round":
                        self._on_round(place, *content)
                    elif losses == self._losses[place]:
                        apply_changes(path := self._jobs[place][1], *content)
                        if "config.json" in content[0]:  # of a configuration that came from here
                            RunDirectory.open(path).sign()
                for task in ended:
                    yield from self._end(task)
        finally:
            self._cancel()

    def _start(self, place: int, queue: Any) -> None:
        """Hand a job to the cluster."""
        config, path = self._jobs[place]
        has_gpu = self._ray.cluster_resources().get("GPU", 0) >= 1
        if isinstance(config, LanguageConfig):  # It trains on a GPU where there is one, as outside of a cluster.
            needs_gpu = has_gpu and not config.settings.get("use_cpu", False)
        elif (needs_gpu := config.device.startswith("cuda")) and not has_gpu:
            log.warning("%s needs a GPU, and waits until a node with one joins; for the CPU: --device cpu.", path)
        remote = self._remote.options(num_cpus=1, num_gpus=int(needs_gpu), name=f"{path.parent.name}/{path.name}")
        files = read_files(path, list_files(path))
        with suppress(RunDirectoryError):  # the node says what is wrong with it
            files |= {SIGNATURE: b""} if RunDirectory.open(path).is_trusted else {}  # the node's user signs it there
        sender = place, self._losses[place]
        task = remote.remote(queue, sender, config.to_json(), path, files, SAVE_SECONDS)
        self._tasks[task] = place

    def _end(self, task: Any) -> Iterator[tuple[int, str | None]]:
        """Take the result of a run; yield its place and why it failed, or nothing if it is started again."""
        place, errors = self._tasks.pop(task), self._ray.exceptions
        path = self._jobs[place][1]
        lost = errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError, errors.ObjectLostError
        try:
            failure = self._ray.get(task)
        except lost as loss:
            self._losses[place] += 1
            if self._losses[place] <= RETRIES:
                self._waiting.appendleft(place)
            else:
                reason = f"its node or its process was lost {RETRIES + 1} times ({type(loss).__name__})"
                yield place, f"{reason}; see Ray's logs on the nodes, in /tmp/ray/session_latest/logs"
        except errors.RayError as refusal:  # such as a node without whence
            reason = [line for line in f"{type(refusal).__name__}\n{refusal}".splitlines() if line.strip()][-1]
            yield place, note_failure(path, (f"Ray could not run it: {reason}", traceback.format_exc()))
        else:
            yield place, note_failure(path, failure)

    def _cancel(self) -> None:
        """End runs under way: first ask them to, then end their processes."""
        if not self._tasks or not self._ray.is_initialized():  # Who disconnected in between has ended them.
            return
        for force in (False, True):
            for task in self._tasks:
                self._ray.cancel(task, force=force)
            self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=ENDING_SECONDS)


def _make_queue(ray: Any) -> Any:
    """Return a queue for what runs send; its actor lives on this machine, and so outlasts the nodes."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})


Files: TypeAlias = dict[str, bytes]
"""The contents of files by their names relative to a run's directory."""


def train_on_node(
    queue: Any, sender: Any, settings: Mapping[str, Any], home: Path, files: Files, save_seconds: float
) -> tuple[str, str] | None:
    """Train in a temporary directory of this machine, and send home what happens; this is the task that a node runs.

    Args:
        queue: Ray's queue of tuples: the sender, "round" and the rounds done; or the sender, "files", those that are
            new or changed, and the names of those that are gone.
        sender: what says at home which run this is.
        settings: the configuration, from `to_json`.
        home: the run's directory at home, for messages.
        files: what home has of the run.
        save_seconds: seconds from one copy of the unfinished run to the next.

    Returns:
        None, or what went wrong and its traceback.
    """
    torch.set_num_threads(1)
    logging.getLogger("whence").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="whence-") as scratch:
        folder = Path(scratch) / home.name
        apply_changes(folder, files, ())
        stamps, last_time = list_files(folder), time.monotonic()

        def send_changes() -> None:
            nonlocal stamps, last_time
            now = list_files(folder)
            changed = [name for name, stamp in now.items() if stamps.get(name) != stamp]
            gone = [name for name in stamps if name not in now]
            queue.put((sender, "files", read_files(folder, changed), gone))
            stamps, last_time = now, time.monotonic()

        def report(rounds: int, metrics: Mapping[str, Any]) -> None:
            queue.put((sender, "round", rounds))
            # A run goes on from a checkpoint only: a copy without one would have its rounds refused.
            has_checkpoint = list_checkpoints(folder) or any(folder.glob("trl/checkpoint-*"))
            if has_checkpoint and time.monotonic() - last_time >= save_seconds:
                send_changes()

        failure = None
        try:
            config = read_config(settings)
            if SIGNATURE in files:
                RunDirectory.open(folder).sign()
            runner_of(config).run(config, folder, report)
        except (Exception, SystemExit) as error:  # Ray would take an exit for a lost process, and start the run again.
            failure = describe_failure(error).replace(str(folder), str(home)), traceback.format_exc()
        send_changes()
    return failure


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of a directory's files, without what is half written or holds there alone.

    A directory that is not there has no files.
    """
    stamps = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (LOCK, SIGNATURE) and not path.match(".*.tmp"):
            status = path.stat()
            stamps[path.relative_to(folder).as_posix()] = status.st_ino, status.st_size, status.st_mtime_ns
    return stamps


def read_files(folder: Path, names: Collection[str]) -> Files:
    """Return the contents of files of a directory."""
    return {name: (folder / name).read_bytes() for name in names}


def apply_changes(path: Path, files: Files, removed: Collection[str]) -> None:
    """Bring a run's directory up to date with what was sent, as a whole.

    The new directory is made next to the old one and takes its place by renaming. Killed at any moment, `path` is the
    old directory, the new one, or (between two renamings) missing, so that a run starts anew.
    """
    incoming, replaced = (path.with_name(f".{path.name}.{state}") for state in ("incoming", "replaced"))
    with explain_write_errors(path):
        for leftover in (incoming, replaced):  # A process that was killed here may have left them.
            shutil.rmtree(leftover, ignore_errors=True)
        incoming.mkdir(parents=True)
        if path.exists():
            shutil.copytree(path, incoming, copy_function=_link, dirs_exist_ok=True)
        for name in (*removed, *files):
            (incoming / name).unlink(missing_ok=True)  # Writing into it would change the old directory's file, too.
        for name, content in files.items():
            (incoming / name).parent.mkdir(parents=True, exist_ok=True)
            (incoming / name).write_bytes(content)
        flush_to_disk(*(incoming / name for name in files))
        if path.exists():
            path.rename(replaced)
        incoming.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
