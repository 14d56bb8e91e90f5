"""Rounds as they are embedded in the offline file: JSON, compressed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from whence.page.content import (
    EMBEDDED,
    ExploredRun,
    build_pivot,
    build_round,
    choose_steps,
    compress_json,
    describe_text,
    describe_view,
    gather_moment,
    list_curves,
    list_groups,
    list_moments,
    make_thumb,
    order_strip,
    replay_moments,
)
from whence.scores import find_moment

FRAMED = 3
"""Moments at either end of a round that have frames."""

TOKENS = 8
"""Responses at either end of a round that have numbers of each token."""

LINKED_RESPONSES = 32
"""Responses of a finding that can be opened, and have these numbers, too."""

COMPARED_ROUNDS = 12
"""Rounds of each run that a comparison's file holds at most."""

DIGITS = 4
"""Significant digits of a number in the file."""

NOT_EMBEDDED = "This file has frames of the three worst and the three best moments of a round."

OnRound = Callable[[int, int], None]
"""Called with the number of rounds that are done, and of all."""


def embed_rounds(
    runs: Sequence[ExploredRun],
    rounds: Sequence[Sequence[int]],
    on_round: OnRound | None = None,
    findings: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> Iterator[tuple[str, str]]:
    """Yield the id of each round of some runs, and its text: JSON, compressed by gzip, as base64."""
    places = [(index, number) for index, numbers in enumerate(rounds) for number in numbers]
    for done, (index, number) in enumerate(places, start=1):
        content = _build_content(runs[index], number, findings[index] if findings else ())
        yield f"round-{index}-{number}", compress_json(content, DIGITS)
        if on_round is not None:
            on_round(done, len(places))


def _build_content(run: ExploredRun, number: int, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a round with the details of its moments."""
    linked = [record for finding in findings if finding["round"] == number for record in finding["records"]]
    shown = build_round(run, number, rows=True, records=linked)
    records = run.round(number)
    worst, best = list_moments(records, [])
    present = {*records.table["record_id"]}
    most = LINKED_RESPONSES if run.is_language else FRAMED
    named = [find_moment(records.table, record) for record in linked[:most] if record in present]
    framed = [] if run.is_language else [*worst[:FRAMED], *best[:FRAMED], *named]
    replays = replay_moments(run, [(moment, choose_steps(moment.step)) for moment in framed])
    details, thumbs = {}, {}
    for moment in (*worst, *best, *named):
        record = moment.record_id
        replay = replays.get(record, ({}, NOT_EMBEDDED))
        view = gather_moment(run, number, moment, replay=replay)
        details[str(record)] = describe_view(view)
        if run.is_language:  # numbers of each token would make the file heavy
            is_first = moment in (*worst[:TOKENS], *best[:TOKENS], *named)
            details[str(record)] |= describe_text(view.row, run.vocabulary, with_tokens=is_first)
        if view.frames and moment.step is not None:
            thumbs[record] = make_thumb(view.frames[moment.step])
    for about in (*shown["worst"], *shown["best"]):
        about |= {"framed": about["record"] in thumbs, "thumb": thumbs.get(about["record"])}
    columns = list_curves(order_strip(records.table, [*worst, *best]), run.labels)
    # The strip has these.
    del columns["record_ids"], columns["scores"], columns["dropped"]
    shown["groupings"] = shown["groupings"][:EMBEDDED]
    keys = [entry["key"] for entry in shown["groupings"]]
    pivots = {"\n".join(by): build_pivot(run, number, by) for size in (1, 2) for by in combinations(keys, size)}
    content: dict[str, Any] = {"round": shown, "details": details, "columns": columns, "pivots": pivots}
    if run.is_language:
        # Once for all of a prompt's responses, since each of them shows the others.
        content["groups"] = list_groups(records, [int(record) for record in details])
    return content
