"""Uvicorn on loopback."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import uvicorn

from whence.errors import WhenceError
from whence.page.explorer import ExploredRun, build_round
from whence.page.moment_view import CONTINUATIONS
from whence.page.server.questions import Questions
from whence.page.server.routes import make_app

THREADS = 1
"""Torch's threads: training that goes on next to the page keeps the other cores."""


def serve(
    runs: Sequence[ExploredRun],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    continuations: int = CONTINUATIONS,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the page of some runs until Ctrl-C.

    Args:
        runs: in the order of their numbers on the page.
        host: this machine's own address.
        port: 0 picks a free one.
        continuations: rollouts by which an opened record's advantage is measured.
        on_start: called with the page's address once it can be asked.

    Raises:
        WhenceError: the host is not this machine's own, or the port is taken.
    """
    host = check_loopback(host)
    listener = _listen(host, port)
    torch.set_num_threads(THREADS)
    measurements, causes = Questions(), Questions()
    config = uvicorn.Config(
        make_app(runs, measurements, causes, continuations=continuations),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )
    shown = f"[{host}]" if ":" in host else host
    # The first round would wait for the imports of all that scores and replays.
    threading.Thread(target=_warm_up, args=(runs,), daemon=True).start()

    def stop() -> None:
        measurements.close()
        causes.close()

    # Whoever asks from now on waits for the answer: the socket listens.
    on_start(f"http://{shown}:{listener.getsockname()[1]}/")
    try:
        _Server(config, stop).run(sockets=[listener])
    except KeyboardInterrupt:  # Uvicorn ends its requests first, then passes the signal on
        pass
    finally:
        stop()
        listener.close()


def check_loopback(host: str) -> str:
    """Return a host if it is this machine's own.

    Raises:
        WhenceError: it is another's, or of every network.
    """
    name = host.strip("[]")
    try:
        is_loopback = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise WhenceError(
            f"--host is {host!r}, and the page is served to this machine only: it has no password. Use 127.0.0.1, and "
            "reach it from elsewhere through an SSH tunnel: ssh -L 8000:127.0.0.1:8000 MACHINE."
        )
    return name


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
    """Build the last round of the first run, which the page opens with."""
    for run in runs[:1]:
        with suppress(Exception):  # whoever opens the round is told
            build_round(run, run.directory.rounds()[-1])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as refusal:
        listener.close()
        raise WhenceError(
            f"{host}:{port} cannot be listened to: {refusal.strerror}. Choose another --port; 0 picks a free one."
        ) from None
    listener.listen(128)
    return listener
