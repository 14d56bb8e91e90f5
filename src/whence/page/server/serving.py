"""Uvicorn on loopback."""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from zlib import crc32

import torch
import uvicorn

from whence.core import WhenceError
from whence.page.explored.moment_view import CONTINUATIONS
from whence.page.explored.rounds import build_round, choose_round
from whence.page.explored.run import ExploredRun
from whence.page.server.questions import Questions
from whence.page.server.routes import make_app

HOST = "127.0.0.1"
"""The page is served to this machine only: it has no password."""

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports that runs' paths stand for; systems pick none of them by themselves."""

THREADS = 1
"""Torch's threads: training that goes on next to the page keeps the other cores."""


def serve(
    runs: Sequence[ExploredRun],
    *,
    port: int | None = 0,
    continuations: int = CONTINUATIONS,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the page of some runs until Ctrl-C.

    Args:
        runs: in the order of their numbers on the page.
        port: 0 picks a free one; None picks one by the first run's path, so that links to records stay.
        continuations: rollouts by which an opened record's advantage is measured.
        on_start: called with the page's address once it can be asked.

    Raises:
        WhenceError: the port is taken.
    """
    try:
        listener = _listen(runs) if port is None else socket.create_server((HOST, port))
    except OSError as refusal:
        raise WhenceError(
            f"{HOST}:{port} cannot be listened to: {refusal.strerror}. Choose another --port; 0 picks a free one."
        ) from None
    torch.set_num_threads(THREADS)
    measurements, causes, findings = Questions(), Questions(), Questions()
    config = uvicorn.Config(
        make_app(runs, measurements, causes, findings, continuations=continuations),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    # The first round would wait for the imports of all that scores and replays.
    threading.Thread(target=_warm_up, args=(runs,), daemon=True).start()

    def stop() -> None:
        measurements.close()
        causes.close()
        findings.close()

    # Whoever asks from now on waits for the answer: the socket listens.
    on_start(f"http://{HOST}:{listener.getsockname()[1]}/")
    try:
        _Server(config, stop).run(sockets=[listener])
    except KeyboardInterrupt:  # Uvicorn ends its requests first, then passes the signal on
        pass
    finally:
        stop()
        listener.close()


def _listen(runs: Sequence[ExploredRun]) -> socket.socket:
    """Listen to the port that a run's path stands for, or, if it is taken, to any."""
    path = str(runs[0].directory.path.resolve())
    with suppress(OSError):
        return socket.create_server((HOST, FIRST_PORT + crc32(path.encode()) % PORTS))
    return socket.create_server((HOST, 0))


class _Server(uvicorn.Server):
    """A server that says when it is about to end its requests."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Call back, so that no request waits for a measurement, then shut down."""
        self._on_stop()
        await super().shutdown(sockets)


def _warm_up(runs: Sequence[ExploredRun]) -> None:
    """Build the round of the first run that the page opens with."""
    for run in runs[:1]:
        with suppress(Exception):  # whoever opens the round is told
            if opens := choose_round(run, run.directory.rounds()):
                build_round(run, opens["round"])
