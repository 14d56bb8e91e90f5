"""Causes of a language model's response, in the terminal and as JSON."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whence.cli.cause_tables import print_strip
from whence.cli.console import console, make_table, print_line
from whence.cli.progress import RoundBar
from whence.runs import RunDirectory

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

BY = {"influence": "raw", "bm25": "bm25", "embedding": "embedding"}
"""The method of `find_response_causes` by the name that the command has for it."""

_EXCERPT = 60


@dataclass(frozen=True)
class ResponseCauses:
    """What taught a language model a response.

    Attributes:
        run: the run's directory.
        prompt: what is asked about.
        response: the response to it.
        by: a key of `BY`.
        log_prob_first: the response's log-probability under the first policy; None: not measured.
        log_prob: the same under the trained model; of a run without one, under the policy of the last scored round.
        rounds: each round's sums; see `sum_rounds`.
        raised: the records that raised it most.
        lowered: those that lowered it most.
        notes: what is missing, in sentences.
    """

    run: str
    prompt: str
    response: str
    by: str
    log_prob_first: float | None
    log_prob: float | None
    rounds: "pl.DataFrame"
    raised: "pl.DataFrame"
    lowered: "pl.DataFrame"
    notes: list[str]

    @property
    def text(self) -> str:
        """What was found, in sentences."""
        from whence.page.cause_view import format_probability, tell_rounds

        what = f"“{shorten(self.response)}” after “{shorten(self.prompt)}”"
        if self.log_prob_first is not None and self.log_prob is not None:
            first, now = map(format_probability, (self.log_prob_first, self.log_prob))
            what += f": its probability was {first} (log {self.log_prob_first:.3g}) under the first policy"
            what += f" and is {now} (log {self.log_prob:.3g}) now"
        if self.raised.is_empty():
            return f"{what}. No record of any round raised it."
        top = self.raised.row(0, named=True)
        strongest = f"The strongest record is {top['record_id']} in round {top['round']}."
        return f"{what}. {tell_rounds(self.rounds)} {strongest}"


def gather_response_causes(run: RunDirectory, prompt: str, response: str, *, by: str, top: int) -> ResponseCauses:
    """Score the records of all rounds below a progress bar, and gather what taught the response.

    Args:
        run: the run.
        prompt: a text.
        response: a text.
        by: a key of `BY`.
        top: the most records at either end.

    Raises:
        WhenceError: see `find_response_causes`.
    """
    from whence.diagnosis import find_response_causes, measure_trained, rank_records, sum_rounds
    from whence.experiments.llm.language_rebuilding import list_policies

    reads_policies = by != "bm25"
    policies = list_policies(run) if reads_policies else None
    with RoundBar("rounds", "scoring") as bar:
        causes = find_response_causes(run, prompt, response, method=BY[by], on_round=bar.update)
    log_probs = causes["log_prob"].drop_nulls()
    trained = measure_trained(run, prompt, response) if reads_policies else None
    notes = []
    if policies is not None and policies.missing:
        notes.append(
            f"The policies of {len(policies.missing)} of {len(run.rounds())} rounds were not kept "
            f"({_list_spans(policies.missing)}), so their records are not scored. To keep all, train with --settings "
            f"'{policies.settings}'. Without policies: --by bm25."
        )
    if reads_policies and trained is None:
        last = causes["round"][-1]
        notes.append(f"The run holds no trained model yet; “now” is the policy that drew the records of round {last}.")
    return ResponseCauses(
        run=str(run.path),
        prompt=prompt,
        response=response,
        by=by,
        log_prob_first=None if log_probs.is_empty() else log_probs[0],
        log_prob=log_probs[-1] if trained is None and not log_probs.is_empty() else trained,
        rounds=sum_rounds(causes),
        raised=rank_records(causes, lowest=False, most=top),
        lowered=rank_records(causes, lowest=True, most=top),
        notes=notes,
    )


def _list_spans(numbers: list[int]) -> str:
    """Return whole numbers in order as text, with neighbours as spans: "2 to 5, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def print_response_causes(causes: ResponseCauses) -> None:
    """Print what taught a response: sentences, the strip over rounds, and the records."""
    print_line(causes.text)
    print_strip(causes.rounds)
    for records, verb in ((causes.raised, "raised"), (causes.lowered, "lowered")):
        if not records.is_empty():
            console.print(_make_record_table(records, verb))
    for note in causes.notes:
        print_line(f"Note: {note}")


def _make_record_table(records: "pl.DataFrame", verb: str) -> "Table":
    rows = [
        [
            *(row["round"], row["record_id"], shorten(row["prompt"]), shorten(row["response"])),
            *(f"{row['reward']:.3g}", f"{row['advantage']:+.3g}", f"{row['score']:+.3g}"),
        ]
        for row in records.iter_rows(named=True)
    ]
    headings = ["round", "record", "prompt", "response", "reward", "advantage", "score"]
    return make_table(f"The {len(rows)} records that {verb} it most", headings, rows)


def describe_response_causes(causes: ResponseCauses) -> dict[str, Any]:
    """Return what taught a response in JSON types."""
    tables = {name: getattr(causes, name).to_dicts() for name in ("rounds", "raised", "lowered")}
    return {**vars(causes), "text": causes.text, **tables}


def shorten(text: str) -> str:
    """Return a text on one line, cut to the width of a table's cell."""
    line = show_text(text)
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 1] + "…"


def show_text(text: str) -> str:
    """Return a text on one line, its line breaks and tabs written out."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
