"""The server's routes: the page, and the JSON that it asks for."""

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whence.core import RunDirectoryError, WhenceError, first_line
from whence.page.explored.cause_view import SCORED
from whence.page.explored.grid import build_pivot, query_records
from whence.page.explored.moment_view import CONTINUATIONS
from whence.page.explored.rounds import build_detail, build_round, describe_runs
from whence.page.explored.run import ExploredRun
from whence.page.html import list_figures, render_runs
from whence.page.server.questions import Questions, explain, gather_findings, measure
from whence.runs import write_flag

LONGEST_TEXT = 500
"""Characters of a search, a filter or a note."""

LARGEST_BODY = 8_000
"""Bytes of a request's body."""

NAMES = ("127.0.0.1", "localhost")
"""Names of this machine that a browser may ask for. A web site can point a name of its own here (DNS rebinding)."""

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

Answer = Callable[[Request], Any]


def make_app(
    runs: Sequence[ExploredRun],
    measurements: Questions,
    causes: Questions,
    findings: Questions,
    *,
    continuations: int = CONTINUATIONS,
) -> Starlette:
    """Return the server's application; the processes that answer questions are the caller's to close."""

    def find(request: Request) -> tuple[Any, ...]:
        """Return the run, the round and the record of an address, as far as it names them."""
        place, *numbers = request.path_params.values()
        if place >= len(runs):
            raise HTTPException(404, f"There is no run {place}; the page has {len(runs)}, counted from 0.")
        runs[place].directory.require_rounds(numbers[:1])
        if len(numbers) > 1:
            runs[place].record(*numbers)
        return runs[place], *numbers

    def answer_records(request: Request) -> Any:
        query = request.query_params
        filters = [text[:LONGEST_TEXT].partition(":") for text in query.getlist("filter") if text]
        return query_records(
            *find(request),
            page=_parse_number(query.get("page", "1")),
            size=_parse_number(query.get("size", "50")),
            sort=query.get("sort") or None,
            descending=query.get("dir") == "desc",
            search=query.get("search", "")[:LONGEST_TEXT],
            filters=[(unquote(key), text) for key, _, text in filters],
            groups=[tuple(map(unquote, group.split(":", 1))) for group in query.getlist("group") if ":" in group],  # type: ignore[misc]
            only=query.getlist("only"),
            ids=[_parse_number(record) for record in query.get("ids", "").split(",") if record],
        )

    def answer_pivot(request: Request) -> Any:
        run, number = find(request)
        return build_pivot(run, number, request.query_params.getlist("by"))

    def answer_flags(request: Request) -> Any:
        (run,) = find(request)
        return {"flags": run.list_flags()}

    def answer_findings(request: Request) -> Any:
        (run,) = find(request)
        return findings.ask(gather_findings, run, max(run.directory.rounds(), default=0), 0, None)

    async def write(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise HTTPException(413, f"A note has up to {LONGEST_TEXT} characters.")
        return await _in_thread(lambda request: answer_flag(request, bytes(body)))(request)

    def answer_flag(request: Request, body: bytes) -> Any:
        run, number, record = find(request)
        try:
            note = json.loads(body)["note"]
        except (KeyError, TypeError, ValueError):
            raise HTTPException(400, 'JSON is needed, such as {"note": "text"}; null takes the flag away.') from None
        if note is not None and not (isinstance(note, str) and len(note) <= LONGEST_TEXT):
            raise HTTPException(400, f"A note is a text of up to {LONGEST_TEXT} characters, or null.")
        write_flag(run.directory.path, number, record, note)
        return {"flag": note}

    def answer_detail(request: Request) -> Any:
        run, number, record = find(request)
        detail = build_detail(run, number, record)
        if run.is_language or continuations < 1:
            return detail
        # The page asks for it in a second request: rollouts may take many times as long as the frames.
        text = (
            f"{continuations} fresh rollouts take this action and {continuations} follow the policy, in the same state."
        )
        return detail | {"mc_pending": True, "mc_text": text}

    def answer_advantage(request: Request) -> Any:
        run, number, record = find(request)
        return measurements.ask(measure, run, number, record, continuations)

    def answer_causes(request: Request) -> Any:
        by = request.query_params.get("by", next(iter(SCORED)))
        if by not in SCORED:
            raise HTTPException(400, f"by is {by[:20]!r}; {' or '.join(SCORED)} is needed.")
        run, number, record = find(request)
        return causes.ask(explain, run, number, record, by)

    async def show_page(request: Request) -> Response:
        return HTMLResponse((await run_in_threadpool(render_runs, runs)).encode("utf-8", "replace"))

    of_round = "/api/runs/{run:int}/rounds/{round:int}"
    routes = [
        Route("/", show_page),
        Route("/api/page", _in_thread(lambda request: describe_runs(runs))),
        Route("/api/figures", _in_thread(lambda request: list_figures(runs))),
        Route(of_round, _in_thread(lambda request: build_round(*find(request)))),
        Route("/api/runs/{run:int}/findings", _in_thread(answer_findings)),
        Route("/api/runs/{run:int}/flags", _in_thread(answer_flags)),
        Route(f"{of_round}/pivot", _in_thread(answer_pivot)),
        Route(f"{of_round}/records", _in_thread(answer_records)),
        Route(f"{of_round}/records/{{record:int}}", _in_thread(answer_detail)),
        Route(f"{of_round}/records/{{record:int}}/flag", write, methods=["PUT"]),
        Route(f"{of_round}/records/{{record:int}}/advantage", _in_thread(answer_advantage)),
        Route(f"{of_round}/records/{{record:int}}/causes", _in_thread(answer_causes)),
    ]
    middleware = [
        Middleware(Guard),
        Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _describe_refusal})


def _in_thread(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that computes its JSON in a worker thread, and puts errors in a sentence."""

    async def respond(request: Request) -> Response:
        try:
            content = await run_in_threadpool(answer, request)
            body = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except HTTPException:
            raise
        except WhenceError as refusal:
            return JSONResponse({"error": str(refusal)}, 404 if isinstance(refusal, RunDirectoryError) else 400)
        except Exception as failure:  # a damaged file, or a fault of ours: the page goes on
            logger.exception("%s failed", request.url.path)
            return JSONResponse({"error": f"{type(failure).__name__}: {first_line(failure)}"}, 503)
        return Response(body, media_type="application/json")

    return respond


async def _describe_refusal(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, HTTPException)
    return JSONResponse({"error": refusal.detail}, refusal.status_code, refusal.headers)


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{text[:40]!r} is no whole number.")
    return int(text)


class Guard:
    """Refuses what other web sites' pages send to this machine, and puts security headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        refusal = JSONResponse({"error": "Another site's page may not ask this one."}, 403)
        await (refusal if _is_foreign(Request(scope)) else self.app)(scope, receive, send_guarded)


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
