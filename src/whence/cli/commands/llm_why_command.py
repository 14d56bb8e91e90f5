"""`whence llm why`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
import typer
from rich.text import Text

from whence.causes import find_response_causes, measure_trained, rank_records, sum_rounds
from whence.cli.terminal import (
    AsJson,
    RoundBar,
    Trust,
    console,
    errors,
    find_round,
    make_printable,
    make_table,
    print_causes,
    print_json,
    print_line,
    print_response,
    shorten,
    show_text,
)
from whence.core import WhenceError
from whence.page import CauseView, Decision, describe_causes
from whence.runs import RunDirectory
from whence.scores import find_moments
from whence.stored.language import Explanation, explain_response, list_policies

STRONG, WEAK = 0.4, 0.1
"""Shares of the largest part from which a token is coloured fully, and at all."""


def why(
    run: Annotated[Path, typer.Argument(help="A run directory of a language model, finished or not.")],
    round: Annotated[
        int | None, typer.Option(help="The round, from 1. (default: that of --record, or the last)", show_default=False)
    ] = None,
    record: Annotated[
        int | None, typer.Option(help="The response. (default: the most harmful of the round)", show_default=False)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Ask what taught the model an answer to this prompt,", metavar="TEXT", show_default=False),
    ] = None,
    response: Annotated[
        list[str] | None,
        typer.Option(help="and this is the answer. Repeat both for more examples.", metavar="TEXT", show_default=False),
    ] = None,
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Ask what taught it the responses that were flagged on the run's page.")
    ] = False,
    by: Annotated[
        Literal["influence", "nearest", "bm25"],
        typer.Option(
            help="How records are scored for these answers: nearest, advantage × cosine of the gradients of log π, "
            "best with ten examples or more; influence; bm25, advantage × similarity of words, which needs no policy."
        ),
    ] = "nearest",
    top: Annotated[
        int, typer.Option(help="Tokens and rows of the target, or records, to list at either end.", min=1)
    ] = 5,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Show which tokens of a response its score comes from; or what taught the model an answer.

    A token's part says what training on this token does to the target; a response's parts sum to its score. The
    target is a mean over rows: demonstrations, or the round's responses. Each has a part of the score, too.

    Parts are computed by the policy of the round. It is there for round 1, and for rounds whose checkpoints were kept:
    --settings '{"save_every": 1, "keep_checkpoints": 40}'.

    With --prompt and --response, or --flagged, it scores the records of all rounds whose policy is there, each at the
    policy that drew it: above 0, the record speaks for these responses after these prompts.

    Example: whence llm why runs/chains --round 3 --record 70

    Example: whence llm why runs/chains --prompt '8-1?' --response '8-1=8;8'

    Example: whence llm why runs/chains --flagged
    """
    prompts, responses = prompt or [], response or []
    ways = bool(prompts), flagged, (round, record).count(None) < 2
    if len(prompts) != len(responses) or sum(ways) > 1:
        raise WhenceError(
            "--prompt and --response go together, as often as one likes, without --flagged, --round and --record: they "
            "ask what taught an answer, over all rounds; so does --flagged. --round and --record name one stored "
            "response."
        )
    directory = RunDirectory.open(run, trust=trust)
    if not directory.is_language:
        raise WhenceError(f"{run} is no language model's run: its records have no tokens. See whence show {run}.")
    if prompts or flagged:
        causes = _gather_causes(directory, prompts, responses, flagged, by, top)
        if json:
            print_json({"prompts": prompts, "responses": responses, "flagged": flagged, **describe_causes(causes)})
        else:
            print_causes(causes)
        return
    number = find_round(directory, round, record)
    if record is None:
        moments = find_moments(directory.round("records", number), lowest=True, most=1)
        if not moments:
            raise WhenceError(f"No response of round {number} of {run} scores below 0. Name one: --record.")
        record = moments[0].record_id
    with errors.status("Taking the score apart …"):
        explanation = explain_response(directory, number, record)
    if json:
        print_json({"run": str(run), "round": number, **_describe_explanation(explanation, top)})
    else:
        _print_explanation(explanation, number, top)


def _gather_causes(
    run: RunDirectory, prompts: Sequence[str], responses: Sequence[str], flagged: bool, by: str, top: int
) -> CauseView:
    """Score the records of all rounds below a progress bar, and return what taught the responses.

    Their present log-probability is that under the trained model, or under the policy of the last scored round.
    """
    examples, notes = (prompts, responses, run.flags() if flagged else None), list[str]()
    what = f"One of {len(responses)} responses, by the geometric mean"
    if len(responses) == 1:
        what = f"“{shorten(responses[0])}” after “{shorten(prompts[0])}”"
    elif flagged:
        what = f"One of the {len(run.flags())} flagged responses, by the geometric mean"
        notes.append("The flagged responses are asked about, so they are not listed.")
    with RoundBar("rounds", "scoring") as bar:
        causes = find_response_causes(run, *examples, method=by, on_round=bar.update)
    log_probs = causes["log_prob"].drop_nulls().to_list() or [None]
    first, now = log_probs[0], log_probs[-1]
    if by != "bm25":
        policies = list_policies(run)
        if policies.missing:
            notes.append(
                f"The policies of {len(policies.missing)} of {len(run.rounds())} rounds were not kept, so their "
                f"records are not scored. To keep all, train with --settings '{policies.settings}'. Without policies: "
                "--by bm25."
            )
        trained = measure_trained(run, *examples)
        now = now if trained is None else trained
        if trained is None:
            last = causes["round"][-1]
            notes.append(
                f"The run holds no trained model yet; “now” is the policy that drew the records of round {last}."
            )
    raised, lowered = (
        rank_records(causes, lowest=lowest, most=top).drop("log_prob").rename({"record_id": "record"}).to_dicts()
        for lowest in (False, True)
    )
    return CauseView(
        str(run.path), "", Decision(what, first, now), by, sum_rounds(causes), raised, lowered, notes=notes
    )


def _print_explanation(explanation: Explanation, number: int, top: int) -> None:
    print_response(explanation.row, number, colour_tokens(explanation.tokens, explanation.parts))
    total = sum(explanation.parts)
    print_line(f"Blue tokens raise the target, orange ones lower it. Their parts sum to {total:.4g}.")
    places = sorted(range(len(explanation.parts)), key=lambda at: -abs(explanation.parts[at]))[: 2 * top]
    cells = [[at, show_text(explanation.tokens[at]), f"{explanation.parts[at]:+.3g}"] for at in sorted(places)]
    console.print(make_table(f"The {len(cells)} tokens that count most", ["position", "token", "part"], cells))
    for title, pulls in _choose_pulls(explanation, top).items():
        if pulls:
            about = "raises" if title == "with" else "lowers"
            rows = [_list_cells(pull, explanation.row["record_id"]) for pull in pulls]
            heading = f"What it pulls {title}: training on it {about} these terms of the target"
            console.print(make_table(heading, ["part", "of", "advantage", "prompt", "response"], rows))
    if explanation.note is not None:
        print_line(f"Note: {explanation.note}")


def colour_tokens(tokens: Sequence[str], parts: Sequence[float]) -> Text:
    """Return a response's text with its tokens coloured by sign and size of their parts."""
    largest = max(map(abs, parts), default=0.0) or 1.0
    text = Text()
    for token, part in zip(tokens, parts, strict=True):
        share, colour = abs(part) / largest, "#ff8a3d" if part < 0 else "#5f9bff"
        style = f"black on {colour}" if share >= STRONG else colour if share >= WEAK else ""
        text.append(make_printable(token), style)
    return text


def _choose_pulls(explanation: Explanation, top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the target with the largest parts above 0, and with the largest below."""
    part, pulls = pl.col("part"), explanation.pulls
    return {
        "with": pulls.head(top).filter(part > 0).to_dicts(),
        "against": pulls.tail(top).reverse().filter(part < 0).to_dicts(),
    }


def _list_cells(pull: dict[str, Any], explained: int) -> list[str]:
    name = "demonstration" if pull["record"] is None else f"record {pull['record']}"
    of = f"{name}, itself" if pull["record"] == explained else name
    advantage = "" if pull["advantage"] is None else f"{pull['advantage']:+.3g}"
    return [f"{pull['part']:+.3g}", of, advantage, shorten(pull["prompt"]), shorten(pull["response"])]


def _describe_explanation(explanation: Explanation, top: int) -> dict[str, Any]:
    """Return a response's explanation in JSON types."""
    names = ("record_id", "prompt", "response", "reward", "advantage", "score", "keep", "weight", "reason")
    pairs = zip(explanation.tokens, explanation.parts, strict=True)
    return {
        **{name: explanation.row.get(name) for name in names},
        "tokens": [{"text": text, "part": part} for text, part in pairs],
        "pulls": _choose_pulls(explanation, top),
        "notes": [] if explanation.note is None else [explanation.note],
    }
