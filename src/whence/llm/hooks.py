"""Selection rules and flags as functions that slime (THUDM/slime) imports by their path, from a module of yours.

# filters.py: --rollout-sample-filter-path filters.drop --dynamic-sampling-filter-path filters.keep_group
drop = slime_filter(MaxVariance(4))
keep_group = slime_group_filter(ZeroVariance())
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import WhenceError
from whence.llm.base import make_table_rows, pad_rows
from whence.llm.rollout_scores import add_advantages
from whence.llm.text import join_messages
from whence.runs import RunDirectory
from whence.selection import KeepAll, Progress, SelectionRule, check_rule


def slime_filter(
    rule: SelectionRule | None = None, *, flagged: str | Path | None = None
) -> Callable[[Any, Sequence[Sequence[Any]]], None]:
    """Return slime's filter of samples, which sets `remove_sample` of those that a rule drops, or that were flagged.

    A record's id is its sample's `index`. A list in a sample's place, of an agent's turns, is kept or dropped as one.

    Args:
        rule: a rule that reads no scores; None: only flags count.
        flagged: a run directory whose flagged responses are found again by prompt and text; None: none are.

    Raises:
        WhenceError: the rule reads scores, which slime's rollouts lack.
    """
    rule = KeepAll() if rule is None else rule
    _check(rule)
    texts = set() if flagged is None else _read_flagged(RunDirectory.open(flagged))

    def mark(args: Any, groups: Sequence[Sequence[Any]]) -> None:
        responses = [_list_turns(response) for group in groups for response in group]
        for turns, trains in zip(responses, _choose(rule, args, responses), strict=True):
            if not trains or any((join_messages(turn.prompt), turn.response) in texts for turn in turns):
                for turn in turns:
                    turn.remove_sample = True

    return mark


def slime_group_filter(rule: SelectionRule) -> Callable[..., bool]:
    """Return slime's dynamic filter: whether a rule keeps at least one response of a group; see `slime_filter`."""
    _check(rule)
    return lambda args, group, **further: any(_choose(rule, args, [*map(_list_turns, group)]))


def _check(rule: SelectionRule) -> None:
    check_rule(rule)
    if rule.needs_influence:
        raise WhenceError(
            f"{rule!r} reads scores, and slime's rollouts have none as they are drawn. Score them by whence llm score, "
            "flag responses on the page, and pass slime_filter(flagged=RUN); or take a rule such as ZeroVariance()."
        )


def _list_turns(response: Any) -> list[Any]:
    return response if isinstance(response, list) else [response]


def _choose(rule: SelectionRule, args: Any, responses: Sequence[Sequence[Any]]) -> list[bool]:
    """Return which responses a rule keeps; each has the reward and the tokens of its first sample."""
    samples = [turns[0] for turns in responses]
    table = pl.DataFrame({"record_id": [each.index for each in samples], "group": [s.group_index for s in samples]})
    rewards = [sample.get_reward_value(args) for sample in samples]
    table = table.with_columns(pl.Series("reward", rewards, dtype=pl.Float64, strict=False))
    prompts = [sample.tokens[: len(sample.tokens) - sample.response_length] for sample in samples]
    tokens = [sample.tokens[len(prompt) :] for sample, prompt in zip(samples, prompts, strict=True)]
    rows = make_table_rows(add_advantages(table), pad_rows(prompts, tokens, 0))
    return rule.select(rows, None, Progress()).keep.tolist()


def _read_flagged(run: RunDirectory) -> set[tuple[str, str]]:
    """Return prompt and response of each flagged record."""
    flags = run.flags()
    tables = (
        run.round("records", number).join(flags, on="record_id", how="semi") for number in flags["round"].unique()
    )
    return {row for table in tables for row in table.select("prompt", "response").rows()}
