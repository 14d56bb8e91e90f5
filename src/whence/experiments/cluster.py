"""Runs as tasks of a Ray cluster, on many machines."""

import importlib.util
import logging
import os
import socket
import time
import traceback
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from whence.errors import Unsupported, WhenceError, first_line
from whence.experiments.kinds import AnyConfig, runner_of
from whence.experiments.llm.config import LanguageConfig
from whence.experiments.node import list_versions, train_on_node
from whence.experiments.parcels import apply_changes, list_files, pack_files, remove_copy
from whence.experiments.workers import Job, OnJobRound, describe_failure, remove_traceback, write_traceback
from whence.runs.checkpoints import list_checkpoints

PLACES = "local", "ray"
"""Where runs are made: in processes of this machine, or as tasks of a Ray cluster."""

RETRIES = 3
"""How often a run is started again after its node or its process was lost."""

SAVE_SECONDS = 60.0
"""Seconds from one copy of an unfinished run to the next, which is sent home: what a lost node costs at most."""

_ANSWER_SECONDS = 10.0

ENDING_SECONDS = 10.0
"""How long runs under way have, at Ctrl-C, to end their round and to leave nothing on their nodes."""

log = logging.getLogger("whence")


def check_place(on: str) -> None:
    """Refuse a place where runs cannot be made.

    Raises:
        WhenceError: it is unknown.
        Unsupported: Ray is not installed.
    """
    if on not in PLACES:
        raise WhenceError(
            f"on is {on!r}; {' or '.join(PLACES)} is needed. docs/guide/scale.md tells how Ray runs on Slurm and "
            "Kubernetes."
        )
    if on == "ray" and importlib.util.find_spec("ray") is None:
        raise Unsupported(
            "on='ray' (--on ray) needs Ray, which is not installed: in whence's source tree, pip install '.[ray]'."
        )


@contextmanager
def run_all_on_ray(
    jobs: Sequence[Job], workers: int | None, on_round: OnJobRound
) -> Iterator[Iterator[tuple[int, str | None]]]:
    """Connect to a Ray cluster, and yield what `workers.run_all` returns: an iterator that runs jobs as its tasks.

    No job is touched before the iterator's first item, so that a caller may make room for them once there is a cluster.
    At the end of the context, runs under way are ended, and the connection.

    The cluster is the one that this process is connected to, or that RAY_ADDRESS names; otherwise Ray is started on
    this machine, and ended afterwards. A run has a process of its own with one torch thread, and a GPU if its device is
    one, or if it trains a language model and the cluster has one. In a cluster without a GPU, a run whose device is one
    waits for a node that has one, and a warning says so.

    A run trains in a temporary directory of its node. Its files come home once a minute and at its end, so that a run
    whose node is lost goes on where the last copy was made, and so does one that the caller broke off.

    Args:
        jobs: what to run; a finished run is left as it is.
        workers: runs at a time; None: as many as the cluster has room for.
        on_round: called with a job's place and the number of its rounds that are done.

    Yields:
        An iterator of places in `jobs`, each with None or a sentence that says what went wrong.

    Raises:
        WhenceError: there is no such cluster; or Ray is started here, finds no GPU, and a run needs one.
    """
    with _connect(workers, needs_gpu=any(_needs_gpu(config) for config, _ in jobs)) as ray:
        make_task = ray.remote(
            num_cpus=1,
            num_returns="streaming",
            max_calls=1,  # a process for each run, as on one machine
            # Ray would start a lost run with the files that it had at first, and newer ones may have come home since.
            max_retries=0,
        )
        with closing(_Dispatch(ray, make_task(train_on_node), jobs, workers, on_round).run()) as ends:
            yield ends


@contextmanager
def _connect(workers: int | None, *, needs_gpu: bool) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster."""
    address = os.environ.get("RAY_ADDRESS", "")
    address = "" if address == "local" else address
    if not address:
        # What is started here listens to no other machine and sends no figures. Ray reads this when it is imported.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    if ray.is_initialized():
        if needs_gpu:
            _warn_without_gpu(ray)
        yield ray
        return
    check_address(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            _join(ray, address, quiet)
            if needs_gpu:
                _warn_without_gpu(ray)
        else:
            ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
            if needs_gpu and not ray.cluster_resources().get("GPU"):
                raise WhenceError(
                    "A run's device is a GPU, and Ray finds none on this machine. Set RAY_ADDRESS to a cluster that "
                    "has one, or train on the CPU: --set device=cpu."
                )
        yield ray
    finally:
        ray.shutdown()


def _warn_without_gpu(ray: Any) -> None:
    """Warn of a cluster without a GPU, in which a run that needs one waits: the cluster may add a node that has one."""
    if not ray.cluster_resources().get("GPU"):
        log.warning(
            "A run's device is a GPU, and no node of the Ray cluster has one: the run waits until one joins. `ray "
            "status` lists the nodes, and what waits. To train on the CPU, break off, and pass --set device=cpu."
        )


def _join(ray: Any, address: str, settings: Mapping[str, Any]) -> None:
    """Connect to a cluster, whose address Ray reads from RAY_ADDRESS."""
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as refusal:
        if address == "auto":
            raise _no_cluster(address, refusal) from None
        raise WhenceError(
            f"The Ray cluster at RAY_ADDRESS={address} does not let this process in ({first_line(refusal)}). It needs "
            "the same Ray and Python here and there; and, where the cluster has a token, RAY_AUTH_MODE=token and that "
            "token in ~/.ray/auth_token (`ray get-auth-token` prints it)."
        ) from None


def check_address(address: str) -> None:
    """Refuse an address of a cluster that cannot be used, or where nothing answers, for which Ray waits minutes.

    Args:
        address: HOST:PORT, "auto", or nothing.

    Raises:
        WhenceError: see the message.
    """
    if address.startswith("ray://"):
        raise WhenceError(
            f"RAY_ADDRESS is {address!r}, of Ray Client, which streams no results. Give the command on a node of the "
            "cluster, with RAY_ADDRESS=auto, or hand it in with `ray job submit`."
        )
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WhenceError(
            f"RAY_ADDRESS is {address!r}; HOST:PORT is needed, such as 10.0.0.5:6379, or auto for a cluster that runs "
            "on this machine."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as refusal:
        raise _no_cluster(address, refusal) from None


def _no_cluster(address: str, refusal: Exception) -> WhenceError:
    reason = first_line(refusal).rstrip(".")
    return WhenceError(
        f"There is no Ray cluster at RAY_ADDRESS={address} ({reason}). Start one with `ray start --head`, give the "
        "address of another, or unset RAY_ADDRESS to use this machine alone."
    )


def _needs_gpu(config: AnyConfig) -> bool:
    return getattr(config, "device", "cpu").startswith("cuda")


def _takes_gpu(config: AnyConfig, resources: Mapping[str, float]) -> bool:
    """Tell whether a run gets a GPU: a language model trains on one where there is one, as outside of a cluster."""
    if isinstance(config, LanguageConfig):
        return resources.get("GPU", 0) >= 1 and not config.settings.get("use_cpu", False)
    return _needs_gpu(config)


class _Dispatch:
    """The runs of a cluster, seen from the machine that asked for them."""

    def __init__(self, ray: Any, task: Any, jobs: Sequence[Job], workers: int | None, on_round: OnJobRound) -> None:
        self._ray, self._task, self._jobs, self._workers, self._on_round = ray, task, jobs, workers, on_round
        self._waiting = deque(range(len(jobs)))
        self._streams: dict[Any, int] = {}  # of the runs under way, and their places
        self._losses: Counter[int] = Counter()
        self._copied: set[int] = set()  # places whose directories hold files that came home

    def run(self) -> Generator[tuple[int, str | None], None, None]:
        """Yield each job as it ends."""
        try:
            while self._waiting or self._streams:
                while self._waiting and len(self._streams) < self._limit():
                    place = self._waiting.popleft()
                    try:
                        is_finished = self._start(place)
                    except Exception as failure:
                        yield place, f"{describe_failure(failure)}{self._write_traceback(place)}"
                    else:
                        if is_finished:
                            yield place, None
                if self._streams:
                    (stream, *_), _ = self._ray.wait(list(self._streams), num_returns=1)
                    yield from self._receive(stream)
        finally:
            self._cancel(list(self._streams))

    def _limit(self) -> int:
        """Return how many tasks Ray holds at a time: some more than it has room for, so that no node ever waits."""
        return self._workers or max(64, 2 * int(self._ray.cluster_resources().get("CPU", 1)))

    def _start(self, place: int) -> bool:
        """Hand a job to the cluster; return True, and hand in nothing, if it is finished."""
        config, path = self._jobs[place]
        if runner_of(config).is_finished(config, path):
            self._on_round(place, config.rounds)
            return True
        if place in self._copied and not _has_checkpoint(path):
            # The run was lost, and its rounds would be refused: nothing can go on from them.
            remove_copy(path)
        files = pack_files(path, list_files(path)) if path.exists() else None
        gpus = int(_takes_gpu(config, self._ray.cluster_resources()))
        task = self._task.options(num_gpus=gpus, name=f"whence {path.parent.name}/{path.name}")
        stream = task.remote(config.to_json(), str(path), files, list_versions(), SAVE_SECONDS)
        self._streams[stream] = place
        return False

    def _receive(self, stream: Any) -> Iterator[tuple[int, str | None]]:
        """Take the next event of a run; yield its place and why it failed, if it is the last one."""
        place = self._streams[stream]
        path = self._jobs[place][1]
        errors = self._ray.exceptions
        lost = errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError, errors.ObjectLostError
        try:
            kind, content, more = self._ray.get(next(stream))
        except (*lost, errors.LocalRayletDiedError, StopIteration) as loss:
            del self._streams[stream]
            self._losses[place] += 1
            if self._losses[place] <= RETRIES:
                self._waiting.appendleft(place)
            else:
                yield place, _describe_loss(loss)
            return
        except errors.RayError as failure:  # such as a node without whence
            del self._streams[stream]
            yield place, f"{_describe_refusal(failure)}{self._write_traceback(place)}"
            return
        if kind == "round":
            self._on_round(place, content)
        elif kind == "files":
            try:
                apply_changes(path, content, more)
                self._copied.add(place)
            except Exception as failure:  # such as a full disk: of this run alone
                self._cancel([stream])
                yield place, f"{describe_failure(failure)}{self._write_traceback(place)}"
        else:
            del self._streams[stream]
            if content is None:
                remove_traceback(path)
                yield place, None
            else:
                yield place, f"{content}{write_traceback(path, more)}"

    def _write_traceback(self, place: int) -> str:
        return write_traceback(self._jobs[place][1], traceback.format_exc())

    def _cancel(self, streams: Sequence[Any]) -> None:
        """End runs under way: first ask them to, then end their processes."""
        if not self._ray.is_initialized():  # somebody else disconnected, and with that ended them
            return
        for stream in streams:
            self._streams.pop(stream, None)
            self._ray.cancel(stream, force=False)
        until = time.monotonic() + ENDING_SECONDS
        for stream in streams:
            with suppress(self._ray.exceptions.RayError, StopIteration):
                while (left := until - time.monotonic()) > 0:
                    ready, _ = self._ray.wait([stream], timeout=left)
                    if ready:
                        self._ray.get(next(stream))
                self._ray.cancel(stream, force=True)


def _has_checkpoint(path: Path) -> bool:
    """Return whether a run's directory holds a checkpoint: whence's, or TRL's, of a run by GRPO or RLOO."""
    return bool(list_checkpoints(path)) or any(path.glob("trl/checkpoint-*"))


def _describe_loss(loss: BaseException) -> str:
    """Return how a run was lost more often than it is started again."""
    reason = ", perhaps for want of memory" if type(loss).__name__ == "OutOfMemoryError" else ""
    return (
        f"its node or its process was lost {RETRIES + 1} times{reason} ({type(loss).__name__}); see Ray's logs on the "
        "nodes, in /tmp/ray/session_latest/logs"
    )


def _describe_refusal(failure: Exception) -> str:
    lines = [line for line in str(failure).splitlines() if line.strip()]
    return f"Ray could not run it: {lines[-1] if lines else type(failure).__name__}"
