"""Who may ask: this machine's own browser, on the page's own address."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whence.errors import WhenceError

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""On every answer."""

NAMES = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that a browser may ask for."""


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


def split_host(text: str) -> tuple[str, int | None] | None:
    """Return the name and port of a Host header; None if it is no such header."""
    try:
        parts = urlsplit(f"//{text}")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if name is None or parts.username is not None or parts.path or parts.query or parts.fragment or "@" in text:
        return None
    return name, port


class Guard:
    """Refuses what no page of this server asks for, and puts security headers on every answer.

    A web site that the user visits can send requests to this machine, and can point a name of its own here (DNS
    rebinding). The first are known by Origin and Sec-Fetch-Site, the second by Host.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = NAMES) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets are served
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                headers = [pair for pair in message["headers"] if pair[0].decode("latin-1") not in SECURITY_HEADERS]
                message = {**message, "headers": [*headers, *added]}
            await send(message)

        refusal = self._refuse(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            status, text = refusal
            headers = {"allow": "GET, HEAD"} if status == 405 else None
            await JSONResponse({"error": text}, status, headers)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> tuple[int, str] | None:
        """Return a status and a sentence if a request is refused."""
        headers = Headers(scope=scope)
        port = (scope.get("server") or (None, None))[1]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_here(hosts[0], port):
            return 421, "This page answers on 127.0.0.1, localhost and [::1] with its own port only."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, f"{scope['method']} is not allowed: the page only reads. Use GET."
        origin = headers.get("origin")
        if origin is not None and (
            not origin.startswith("http://") or not self._is_here(origin.removeprefix("http://"), port)
        ):
            return 403, "Another site's page may not ask this one."
        if scope["path"] != "/" and headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
            return 403, "Another site's page may not ask this one."
        return None

    def _is_here(self, text: str, port: int | None) -> bool:
        host = split_host(text)
        return host is not None and host[0] in self._names and (host[1] or 80) == (port or 80)
