"""Proofs of a cause: trainings without the records in question, without as many random ones, without a placebo's."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from whence.causes.finders import Behaviour, check_kind, find_causes
from whence.causes.ranking import KEYS
from whence.causes.retraining import (
    VARIANTS,
    AgentTraining,
    LanguageTraining,
    Retraining,
    keep_finite,
    list_choices,
    match_advantages,
    measure_finite,
    train_variants,
)
from whence.causes.verdicts import MOVES, Values, Verdict, judge, list_changes
from whence.core import Action, WhenceError
from whence.runs import RunDirectory, check_links
from whence.selection import read_weights
from whence.statistics import t_interval

if TYPE_CHECKING:
    from whence.stored.agents import AnyEnv

FOLDER = "proofs"
"""The folder of a run that holds what was measured: a file for each question."""

PLACEBOS, SHARED = 10, 10
"""How often another record is asked about until its causes share few with those in question: one of so many at most."""


@dataclass(frozen=True, eq=False)
class Proof:
    """What came of the trainings.

    Attributes:
        behaviour: what the first outcome is of, in words.
        records: what a record is called: "records" or "rollouts".
        size: the number of records that were left out.
        table: a row for each seed, variant and outcome: `seed`, `variant`, `outcome`, `value`; what is missing, null or
            not finite was not measured.
        stored: the outcomes of the policy that the run itself had at the end, None if not measured; empty if the policy
            is not there.
        notes: what a reader has to know of how it was done.
        file: where the numbers are.
    """

    behaviour: str
    records: str
    size: int
    table: pl.DataFrame
    stored: Mapping[str, float | None]
    notes: Sequence[str]
    file: Path

    @cached_property
    def outcomes(self) -> dict[str, Values]:
        """The values of each outcome by variant, in the order of seeds."""
        cells = {(row["outcome"], row["variant"], row["seed"]): row["value"] for row in self.table.to_dicts()}
        seeds, names = self.table["seed"].unique().sort(), [*self.table["outcome"].unique(maintain_order=True)]
        return {
            name: {variant: [keep_finite(cells.get((name, variant, seed))) for seed in seeds] for variant in VARIANTS}
            for name in dict.fromkeys([*names, *self.stored])
        }

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """What may be said of each outcome.

        It "falls" or "rises" without the records, or "no difference" is seen. There is no verdict on what was "not
        measured" in a training, or in "one seed" only, and on any outcome if one is "unlike the run" after training
        again on all records: the others are "not comparable" then.
        """
        return judge(self.outcomes, {name: keep_finite(value) for name, value in self.stored.items()})

    def summarise(self) -> list[dict[str, Any]]:
        """Return a row for each outcome and variant: its `value`, its `change` from "all", and the outcome's `verdict`.

        Values and changes are 95% t intervals over seeds; all None if a seed was not measured.
        """
        rows = []
        for outcome, values in self.outcomes.items():
            for variant, column in values.items():
                value = t_interval([] if None in column else [number for number in column if number is not None])
                about = {"outcome": outcome, "variant": variant, "verdict": self.verdicts[outcome]}
                rows.append(about | {"value": value, "change": t_interval(list_changes(values, variant))})
        return rows

    @property
    def text(self) -> str:
        """A sentence for each outcome, those that moved first; if the replay is not the run, what shows that."""

        def describe(*verdicts: Verdict) -> list[str]:
            return [self._describe(outcome) for outcome, verdict in self.verdicts.items() if verdict in verdicts]

        sentences = [*describe(*MOVES), *describe("no difference", "one seed", "not measured")]
        if unlike := describe("unlike the run"):
            begins = f"Nothing can be said, since training again on all {self.records} does not give the run"
            sentences.insert(0, f"{begins}: {'; '.join(unlike)}, further off than seeds differ.")
        return " ".join(sentences) or "Nothing was measured."

    def _describe(self, outcome: str) -> str:
        """Return an outcome's verdict in words, with the means that it is about."""
        verdict, numbers = self.verdicts[outcome], self.outcomes[outcome]
        measured = {variant: [value for value in numbers[variant] if value is not None] for variant in VARIANTS}
        full, without, random, placebo = (
            format_outcome(outcome, t_interval(measured[variant])["mean"]) for variant in VARIANTS
        )
        subject = f"{outcome} of {self.behaviour}" if outcome == next(iter(self.outcomes)) else outcome
        if verdict in MOVES:
            return (
                f"Without these {self.size:,} {self.records} the {subject} {verdict} from {full} to {without}; without "
                f"{self.size:,} random ones it is {random}, without a placebo's {placebo}."
            )
        if verdict == "unlike the run":
            stored = format_outcome(outcome, self.stored[outcome])
            return f"the {subject} is {full} with all and {stored} in the run itself"
        if verdict == "not measured":
            count, most = (sum(map(len, each.values())) for each in (measured, numbers))
            return f"Not measured: the {subject}; only {count} of {most} trainings gave a number."
        begins, reason = f"No difference is seen in the {subject}", "chance or other sets of records may do as much"
        if verdict == "one seed":
            begins, reason = f"Nothing can be said of the {subject}", "one seed has no interval"
        return (
            f"{begins}: it is {full} with all, {without} without these {self.size:,} {self.records}, {random} without "
            f"random ones, {placebo} without a placebo's; {reason}."
        )


def format_outcome(outcome: str, value: float | None, sign: str = "") -> str:
    """Return an outcome as text: shares in percent; of a change with the sign "+"."""
    if keep_finite(value) is None:
        return "not measured"
    return f"{value:{sign}{'.1%' if outcome.startswith('share') else '.4g'}}".replace("-", "−")


def prove(
    run: RunDirectory,
    behaviour: "Behaviour | None" = None,
    left_out: pl.DataFrame | None = None,
    *,
    words: str | None = None,
    method: str = "nearest",
    top: int = 64,
    rounds: Sequence[int] | None = None,
    seeds: int = 5,
    training: AgentTraining | LanguageTraining | None = None,
    env: "AnyEnv" = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Proof:
    """Train rounds again without the records that taught a behaviour, and compare with two controls.

    Each training begins with the policy before the first round and goes through all rounds on the stored rollouts, with
    advantages as stored: an agent's by SB3's own `train()`, a language model's of any trainer by `train_again`. Each
    seed has four: with all records, without those in question, without as many random ones of the same rounds, and
    without a placebo's, which the finder names for what other records did, a tenth of those in question among them at
    most. Both are drawn anew in each seed: see `judge`. What was measured is kept, and the same question asked again
    continues after the last training.

    Args:
        run: the run of an agent or of a language model, or rollouts that `score_rollouts` made a run of.
        behaviour: see `find_causes`; None: what the left-out records did.
        left_out: the records to leave out, `round` and `record_id`; None: those that a finder names. A placebo for
            records that are given are others of near advantages.
        words: the behaviour in words.
        method: the finder, a method of `find_causes`.
        top: how many records it names.
        rounds: the rounds, an agent's without gaps; None: all.
        seeds: the number of seeds, of minibatches, random records, placebos and tests.
        training: how a training is done and what is measured.
        env: the environment of an agent; see `find_causes`.
        on_stage: called with the name of each training as it begins.

    Raises:
        RunDirectoryError: a round is not there, or the policy before the first one.
        ReplayError: the environment to test in cannot be made.
        WhenceError: neither a behaviour nor records are given; or see `check_left_out` and `find_causes`.
    """
    if behaviour is None and left_out is None:
        raise WhenceError(
            "Nothing says what to leave out. Name a behaviour, and a finder looks for its causes: --why-flagged, of an "
            "agent --record 60437, of a language model --prompt and --response. Or name the records: --flagged, of an "
            "agent --where."
        )
    check_links(run.path)
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    run.require_rounds(numbers)
    if not run.is_language:
        run.require_rounds(name="policies")
    tables = {number: run.round("records", number) for number in numbers}
    trained = list_trained(tables)

    def rank(wanted: "Behaviour") -> pl.DataFrame:
        causes = find_causes(run, wanted, rounds=numbers, method=method, env=env)
        ranked = causes.join(trained.select(KEYS), on=KEYS, how="semi")
        return ranked.sort("score", *KEYS, descending=[True, False, False])

    is_stored = isinstance(behaviour, pl.DataFrame)  # these are not named for themselves: nor are a placebo's
    with _open(run, tables, behaviour, training, env) as retraining:
        uses_finder = left_out is None
        if left_out is None:
            assert behaviour is not None
            on_stage(f"finding the {retraining.records}")
            left_out = name_top(rank(behaviour), top)
        left_out = check_left_out(trained, left_out)
        rows, others = retraining.make_rows(left_out), trained.join(left_out, on=KEYS, how="anti")

        def choose_placebo(generator: np.random.Generator) -> pl.DataFrame:
            if not uses_finder:
                return match_advantages(trained, left_out, generator)
            for _ in range(PLACEBOS):
                places = generator.choice(len(others), min(len(rows), len(others)), replace=False)
                ranked = rank(others[places].select(KEYS) if is_stored else retraining.read(others[places]))
                if SHARED * len(ranked.head(top).join(left_out, on=KEYS, how="semi")) <= top:
                    break
            else:  # whatever is asked about has these causes
                ranked = ranked.join(left_out, on=KEYS, how="anti")
            return ranked.head(top)

        def train_without(choose: Callable[[int], pl.DataFrame], seed: int) -> dict[str, float]:
            return retraining.measure(retraining.train(choose(seed), seed), rows, seed)

        choices = list_choices(left_out, others, choose_placebo)
        trainings = {variant: partial(train_without, choose) for variant, choose in choices.items()}
        subject = words or retraining.subject
        question = {
            "behaviour": subject,
            "rounds": numbers,
            "method": method if uses_finder else None,
            **retraining.about,
        }
        folder = run.path / FOLDER
        content = question | {"left_out": left_out.to_dict(as_series=False)}
        table, file = train_variants(trainings, seeds, folder, [question, left_out.rows()], content, on_stage)
        ended, notes = retraining.load_end(), list(retraining.notes)
        stored = {} if ended is None else measure_finite(lambda: retraining.measure(ended, rows, 0), "the run itself")
        if not stored:
            notes.append("The run's own policy after these rounds could not be measured: the replay may be unlike it.")
    return Proof(subject, retraining.records, len(left_out), table, stored, notes, file)


def _open(
    run: RunDirectory, tables: Mapping[int, pl.DataFrame], behaviour: Any, training: Any, env: Any
) -> AbstractContextManager[Retraining]:
    """Open the rounds to train again in the way of the run's kind; the other kind's library may not be installed."""
    is_action = isinstance(behaviour, Action)
    check_kind(
        run,
        agents={"Action": is_action, "AgentTraining": isinstance(training, AgentTraining), "env": env},
        language={
            "Examples": behaviour is not None and not is_action and not isinstance(behaviour, pl.DataFrame),
            "LanguageTraining": isinstance(training, LanguageTraining),
        },
    )
    if run.is_language:
        from whence.causes.language_retraining import open_language

        return open_language(run, tables, behaviour, training or LanguageTraining())
    from whence.causes.agent_retraining import open_agent

    return open_agent(run, tables, behaviour, training or AgentTraining(), env)


def list_trained(tables: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    """Return `round`, `record_id` and `advantage` of the records that trained, from the tables of rounds."""
    columns = "record_id", pl.col("advantage").cast(pl.Float64)
    return pl.concat(
        table.filter(pl.Series(read_weights(table) > 0)).select(pl.lit(number, dtype=pl.Int64).alias("round"), *columns)
        for number, table in tables.items()
    )


def check_left_out(trained: pl.DataFrame, left_out: pl.DataFrame) -> pl.DataFrame:
    """Return the records to leave out that trained, in order; refuse it if none did, or more than half of a round."""
    chosen = left_out.select(KEYS).unique().join(trained.select(KEYS), on=KEYS, how="semi").sort(KEYS)
    if chosen.is_empty():
        raise WhenceError(
            f"None of the {len(left_out)} records to leave out trained in these rounds, in which {len(trained)} did. "
            "Flag records on the run's page (whence view), or name other rounds."
        )
    counts = chosen.group_by("round").len().join(trained.group_by("round").len("all"), on="round").sort("round")
    for number, count, total in counts.iter_rows():
        if 2 * count > total:
            raise WhenceError(
                f"{count} of the {total} records that trained in round {number} are to be left out, and as many others "
                "are needed to compare with. Leave out fewer: --top."
            )
    return chosen


def name_top(ranked: pl.DataFrame, top: int) -> pl.DataFrame:
    """Return the records that a finder scores highest; refuse where fewer score above 0."""
    above = ranked.filter(pl.col("score") > 0)
    if len(above) < top:
        raise WhenceError(
            f"Of {len(ranked)} records that trained, {len(above)} score above 0, and top is {top}. Name fewer: --top."
        )
    return above.head(top).select(KEYS)
