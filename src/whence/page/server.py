"""The page on loopback, live while training goes on: its routes, their JSON, and Uvicorn."""

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote
from zlib import crc32

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from whence.core import RunDirectoryError, WhenceError, first_line
from whence.page.content import (
    CONTINUATIONS,
    SCORED,
    ExploredRun,
    Search,
    attempt,
    build_causes,
    build_detail,
    build_pivot,
    build_round,
    choose_round,
    describe_runs,
    find_records,
    query_records,
)
from whence.page.html import list_figures, render_runs
from whence.page.questions import Questions, gather_findings, measure
from whence.page.templates import LIBRARIES, read_library
from whence.runs import write_flag, write_flags

HOST = "127.0.0.1"
"""The page is served to this machine only: it has no password."""

NAMES = (HOST, "localhost")
"""Names of this machine that a browser may ask for. A web site can point a name of its own here (DNS rebinding)."""

FIRST_PORT, PORTS = 20_000, 12_000
"""Ports that runs' paths stand for; systems pick none of them by themselves."""

THREADS = 1
"""Torch's threads: training that goes on next to the page keeps the other cores."""

LONGEST_TEXT = 500
"""Characters of a search, a filter or a note."""

LARGEST_BODY = 8_000
"""Bytes of a request's body."""

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

logger = logging.getLogger("whence.page.server")


def serve(
    runs: Sequence[ExploredRun],
    *,
    port: int | None = 0,
    continuations: int = CONTINUATIONS,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the page of some runs until Ctrl-C; `on_start` is called with its address once it can be asked.

    Port 0 picks a free one; None picks one by the first run's path, so that links to records stay.
    """
    try:
        listener = _listen(runs) if port is None else socket.create_server((HOST, port))
    except OSError as refusal:
        raise WhenceError(
            f"{HOST}:{port} cannot be listened to: {refusal.strerror}. Choose another --port; 0 picks a free one."
        ) from None
    torch.set_num_threads(THREADS)
    processes = [Questions() for _ in ("measurements", "causes", "findings")]
    config = uvicorn.Config(
        make_app(runs, *processes, continuations=continuations),
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
    threading.Thread(target=_warm_up, args=(runs[0],), daemon=True).start()

    def stop() -> None:
        for process in processes:
            process.close()

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


def _warm_up(run: ExploredRun) -> None:
    """Build the round that the page opens with."""
    if opens := choose_round(run, run.directory.rounds()):
        attempt(lambda: build_round(run, opens["round"]), [], "")


def make_app(
    runs: Sequence[ExploredRun],
    measurements: Questions,
    causes: Questions,
    findings: Questions,
    *,
    continuations: int = CONTINUATIONS,
) -> Starlette:
    """Return the server's application; the processes that answer questions are the caller's to close."""

    def find(places: Sequence[int]) -> tuple[Any, ...]:
        """Return the run, the round and the record of an address, as far as it names them."""
        if not places:
            return ()
        place, *numbers = places
        if place >= len(runs):
            raise RunDirectoryError(f"There is no run {place}; the page has {len(runs)}, counted from 0.")
        runs[place].directory.require_rounds(numbers[:1])
        if len(numbers) > 1:
            runs[place].record(*numbers)
        return runs[place], *numbers

    def route(path: str, answer: Callable[..., Any]) -> Route:
        return Route(path, partial(respond, answer))

    def respond(answer: Callable[..., Any], request: Request) -> Response:
        """Answer in JSON, from what the address names and the query; errors are sentences."""
        try:
            content = answer(*find([*request.path_params.values()]), request.query_params)
            body = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except WhenceError as refusal:
            return JSONResponse({"error": str(refusal)}, 404 if isinstance(refusal, RunDirectoryError) else 400)
        except Exception as failure:  # a damaged file, or a fault of ours: the page goes on
            logger.exception("%s failed", request.url.path)
            return JSONResponse({"error": f"{type(failure).__name__}: {first_line(failure)}"}, 503)
        return Response(body, media_type="application/json")

    def answer_detail(run: ExploredRun, number: int, record: int, query: QueryParams) -> Any:
        detail = build_detail(run, number, record)
        if run.is_language or continuations < 1:
            return detail
        # The page asks for it in a second request: rollouts may take many times as long as the frames.
        text = (
            f"{continuations} fresh rollouts take this action and {continuations} follow the policy, in the same state."
        )
        return detail | {"mc_pending": True, "mc_text": text}

    def answer_causes(run: ExploredRun, number: int, record: int, query: QueryParams) -> Any:
        by = query.get("by", next(iter(SCORED)))
        if by not in SCORED:
            raise WhenceError(f"by is {by[:20]!r}; {' or '.join(SCORED)} is needed.")
        return causes.ask(build_causes, run, number, record, by)

    def answer_advantage(run: ExploredRun, number: int, record: int, query: QueryParams) -> dict[str, Any]:
        return measurements.ask(measure, run, number, record, continuations)

    async def write_note(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                return JSONResponse({"error": f"A note has up to {LONGEST_TEXT} characters."}, 413)
        return await run_in_threadpool(respond, partial(_flag_records, bytes(body)), request)

    searches: list[QueryParams] = []

    def search_rounds(run: ExploredRun, query: QueryParams) -> dict[str, Any]:
        """Search all rounds, until a later search is asked for."""
        searches[:] = [query]

        def check() -> None:
            if searches[0] is not query:
                raise WhenceError("Another search began before this one ended.")

        return _query(run, None, query, check=check)

    of_run, of_round = "/api/runs/{run:int}", "/api/runs/{run:int}/rounds/{round:int}"
    of_record = f"{of_round}/records/{{record:int}}"
    routes = [
        Route("/", lambda request: HTMLResponse(render_runs(runs).encode("utf-8", "replace"))),
        *(Route(f"/assets/{name}.js", partial(_show_library, name)) for name in LIBRARIES),
        route("/api/page", lambda query: describe_runs(runs)),
        route("/api/figures", lambda query: list_figures(runs)),
        route(
            f"{of_run}/findings",
            lambda run, query: findings.ask(gather_findings, run, max(run.directory.rounds(), default=0), 0, None),
        ),
        route(f"{of_run}/flags", lambda run, query: {"flags": run.list_flags()}),
        Route(f"{of_run}/flags", write_note, methods=["PUT"]),
        route(f"{of_run}/records", search_rounds),
        route(of_round, lambda run, number, query: build_round(run, number)),
        route(f"{of_round}/pivot", lambda run, number, query: build_pivot(run, number, query.getlist("by"))),
        Route(f"{of_round}/flags", write_note, methods=["PUT"]),
        route(f"{of_round}/records", _query),
        route(of_record, answer_detail),
        route(f"{of_record}/advantage", answer_advantage),
        route(f"{of_record}/causes", answer_causes),
        Route(f"{of_record}/flag", write_note, methods=["PUT"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard), hosts])


def _show_library(name: str, request: Request) -> Response:
    return Response(read_library(name), media_type="text/javascript")


def _query(
    run: ExploredRun, number: int | None, query: QueryParams, check: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return the records that a query of the grid asks for, of a round or of all."""
    page, size = (_parse_number(query.get(name, usual)) for name, usual in (("page", "1"), ("size", "50")))
    return query_records(run, number, _read_search(query), page=page, size=size, check=check)


def _read_search(query: QueryParams) -> Search:
    pairs = {name: [text.partition(":") for text in query.getlist(name) if text] for name in ("filter", "group")}
    return Search(
        sort=query.get("sort") or None,
        descending=query.get("dir") == "desc",
        search=query.get("search", "")[:LONGEST_TEXT],
        filters=[(unquote(key), text[:LONGEST_TEXT]) for key, _, text in pairs["filter"]],
        where=query.get("where", "")[:LONGEST_TEXT],
        groups=[(unquote(key), unquote(name)) for key, _, name in pairs["group"]],
        only=query.getlist("only"),
        ids=[_parse_number(record) for record in query.get("ids", "").split(",") if record],
    )


def _flag_records(body: bytes, run: ExploredRun, *place: Any) -> dict[str, Any]:
    """Write the note of a request's body as the flag of a record, or of all that a query of a round or the run finds.

    Of several, those that are flagged keep their notes, unless the flags are taken away.
    """
    *numbers, query = place
    number, record = [*numbers, None, None][:2]
    try:
        note = json.loads(body)["note"]
    except (KeyError, TypeError, ValueError):
        raise WhenceError('JSON is needed, such as {"note": "text"}; null takes the flag away.') from None
    if note is not None and not (isinstance(note, str) and len(note) <= LONGEST_TEXT):
        raise WhenceError(f"A note is a text of up to {LONGEST_TEXT} characters, or null.")
    if record is not None:
        write_flag(run.directory.path, number, record, note)
        return {"flag": note}
    search = _read_search(query)
    search = search._replace(only=[*search.only, "flagged" if note is None else "unflagged"])
    records, _, _ = find_records(run, number, search)
    write_flags(run.directory.path, records, note)
    return {"flag": note, "records": len(records)}


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise WhenceError(f"{text[:40]!r} is no whole number.")
    return int(text)


async def _guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse what other web sites' pages send to this machine, and put security headers on every answer."""
    refusal = JSONResponse({"error": "Another site's page may not ask this one."}, 403)
    response = refusal if _is_foreign(request) else await call_next(request)
    response.headers.update(SECURITY_HEADERS)
    return response


def _is_foreign(request: Request) -> bool:
    """Return whether another site's page asks. A link to the page may stand anywhere; its data is for itself.

    What writes has to say that it comes from the page, in JSON, which no form of another site can send.
    """
    headers = request.headers
    is_written = request.method not in ("GET", "HEAD")
    if is_written and not (headers.get("origin") and headers.get("content-type") == "application/json"):
        return True
    is_linked = request.url.path != "/" and headers.get("sec-fetch-site") not in (None, "same-origin", "none")
    return is_linked or headers.get("origin") not in (None, f"http://{headers.get('host')}")
