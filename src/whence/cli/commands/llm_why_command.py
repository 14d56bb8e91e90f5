"""`whence llm why`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from whence.cli.commands.show_command import find_round, list_moments
from whence.cli.console import console, errors, make_printable, make_table, print_json, print_line
from whence.cli.moment_tables import print_response
from whence.cli.options import AsJson
from whence.cli.response_tables import (
    BY,
    describe_response_causes,
    gather_response_causes,
    print_response_causes,
    shorten,
    show_text,
)
from whence.errors import WhenceError, suggest
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from whence.experiments.llm.explaining import Explanation, Pull

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
        str | None,
        typer.Option(help="Ask what taught the model an answer to this prompt,", metavar="TEXT", show_default=False),
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="and this is the answer.", metavar="TEXT", show_default=False)
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="How records are scored for that answer: influence; or a simple rule, advantage × similarity of "
            "texts: bm25 compares words, embedding the policy's last hidden states. (default: influence)",
            show_default=False,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(help="Tokens and rows of the target, or records, to list at either end.", min=1)
    ] = 5,
    pulls: Annotated[
        bool, typer.Option(help="Also list what the response pulls with and against: a pass over the target's rows.")
    ] = True,
    json: AsJson = False,
) -> None:
    """Show which tokens of a response its score comes from; or what taught the model an answer.

    A token's part says what training on this token does to the target; a response's parts sum to its score. The
    target is a mean over rows: demonstrations, or the round's responses. Each has a part of the score, too.

    Parts are computed by the policy of the round. It is there for round 1, and for rounds whose checkpoints were kept:
    --settings '{"save_every": 1, "keep_checkpoints": 40}'.

    With --prompt and --response it scores the records of all rounds whose policy is there, each at the policy that drew
    it: above 0, training on the record raised the probability of this response after this prompt.

    Example: whence llm why runs/chains --round 3 --record 70

    Example: whence llm why runs/chains --prompt '8-1?' --response '8-1=8;8'
    """
    _check_question(prompt, response, by, round, record, pulls)
    directory = RunDirectory.open(run)
    if not directory.is_language:
        raise WhenceError(f"{run} is no language model's run: its records have no tokens. See whence show {run}.")
    if prompt is not None and response is not None:
        causes = gather_response_causes(directory, prompt, response, by=by or "influence", top=top)
        if json:
            print_json(describe_response_causes(causes))
        else:
            print_response_causes(causes)
        return
    number = find_round(directory, round, record, None)
    if record is None:
        moments = list_moments(directory.round("records", number), None, None, None, None)
        if not moments:
            raise WhenceError(f"No response of round {number} of {run} scores below 0. Name one: --record.")
        record = moments[0].record_id
    with errors.status("Taking the score apart …"):
        from whence.experiments.llm.explaining import explain_response  # imports Transformers

        explanation = explain_response(directory, number, record, pulls=pulls)
    if json:
        print_json({"run": str(run), "round": number, **_to_json(explanation, top)})
        return
    _print(explanation, number, top)


def _check_question(
    prompt: str | None, response: str | None, by: str | None, round: int | None, record: int | None, pulls: bool
) -> None:
    """Refuse options that make no question, or two."""
    if prompt is None and response is None:
        if by is not None:
            raise WhenceError(f"--by is {by!r}, and it scores records for an answer. Give --prompt and --response too.")
        return
    if prompt is None or response is None:
        there, missing = ("--response", "--prompt") if prompt is None else ("--prompt", "--response")
        raise WhenceError(f"{there} came without {missing}. An answer to ask about needs both: add {missing} TEXT.")
    others = {"--record": record is not None, "--round": round is not None, "--no-pulls": not pulls}
    if option := next((name for name, is_present in others.items() if is_present), None):
        raise WhenceError(
            f"--prompt and --response came with {option}. They ask what taught an answer, over all rounds; {option} is "
            "about one stored response. Leave out either."
        )
    if by is not None and by not in BY:
        raise WhenceError(f"--by is {by!r}.{suggest(by, BY)}")


def _print(explanation: "Explanation", number: int, top: int) -> None:
    response = colour_tokens(explanation.tokens, explanation.parts)
    print_response(explanation.row, number, response)
    total = sum(explanation.parts)
    print_line(f"Blue tokens raise the target, orange ones lower it. Their parts sum to {total:.4g}.")
    places = sorted(range(len(explanation.parts)), key=lambda at: -abs(explanation.parts[at]))[: 2 * top]
    cells = [[at, show_text(explanation.tokens[at]), f"{explanation.parts[at]:+.3g}"] for at in sorted(places)]
    console.print(make_table(f"The {len(cells)} tokens that count most", ["position", "token", "part"], cells))
    for pulls, title in zip(_choose_pulls(explanation, top), ("with", "against"), strict=True):
        if pulls:
            about = "raises" if title == "with" else "lowers"
            rows = [_list_cells(pull, explanation.row["record_id"]) for pull in pulls]
            heading = f"What it pulls {title}: training on it {about} these terms of the target"
            console.print(make_table(heading, ["part", "of", "advantage", "prompt", "response"], rows))
    for note in explanation.notes:
        print_line(f"Note: {note}")


def colour_tokens(tokens: Sequence[str], parts: Sequence[float]) -> Text:
    """Return a response's text with its tokens coloured by sign and size of their parts."""
    largest = max(map(abs, parts), default=0.0) or 1.0
    text = Text()
    for token, part in zip(tokens, parts, strict=True):
        share, colour = abs(part) / largest, "#ff8a3d" if part < 0 else "#5f9bff"
        style = f"black on {colour}" if share >= STRONG else colour if share >= WEAK else ""
        text.append(make_printable(token), style)
    return text


def _choose_pulls(explanation: "Explanation", top: int) -> "tuple[list[Pull], list[Pull]]":
    """Return the rows of the target with the largest parts above 0, and with the largest below."""
    pulls = explanation.pulls or []
    return (
        [pull for pull in pulls[:top] if pull.part > 0],
        [pull for pull in reversed(pulls[-top:]) if pull.part < 0],
    )


def _list_cells(pull: "Pull", explained: int) -> list[str]:
    name = "demonstration" if pull.record is None else f"record {pull.record}"
    of = f"{name}, itself" if pull.record == explained else name
    advantage = "" if pull.advantage is None else f"{pull.advantage:+.3g}"
    return [f"{pull.part:+.3g}", of, advantage, shorten(pull.prompt), shorten(pull.response)]


def _to_json(explanation: "Explanation", top: int) -> dict[str, Any]:
    row = explanation.row
    with_, against = _choose_pulls(explanation, top)
    pulls = None if explanation.pulls is None else {"with": list(map(vars, with_)), "against": list(map(vars, against))}
    names = ("record_id", "prompt", "response", "reward", "advantage", "score", "keep", "weight", "reason")
    pairs = zip(explanation.tokens, explanation.parts, strict=True)
    return {
        **{name: row.get(name) for name in names},
        "tokens": [{"text": text, "part": part} for text, part in pairs],
        "pulls": pulls,
        "notes": explanation.notes,
    }
