"""Finders: which records of all rounds taught a run a behaviour, an agent's action or a language model's response."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from whence.causes.ranking import KEYS, OnRound
from whence.core import Action, WhenceError
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from whence.causes.response_causes import Examples
    from whence.stored.agents import AnyEnv

Behaviour: TypeAlias = "Action | Examples | pl.DataFrame"
"""What a run is asked about: an agent's actions in states, or a language model's responses to prompts; of either what
stored records did, by their `round` and `record_id`, such as `run.flags()`.
"""


def find_causes(
    run: RunDirectory,
    behaviour: Behaviour,
    *,
    rounds: Sequence[int] | None = None,
    method: str = "influence",
    env: "AnyEnv" = None,
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to the log-probability of a behaviour.

    A positive score speaks for the behaviour. Methods:

    - "influence": what training on the record did to the log-probability, to first order:
      `<grad log pi(behaviour), grad objective_i>` at the policy that collected the record's round (LDA §3.3).
    - "nearest": advantage × cosine of `grad log pi` of what the record did with that of an example of the behaviour, at
      the same policy: the mean over the ten examples that are nearest. The advantage is the one that trained: PPO's
      normalised one.
    - "bm25", of language models: advantage × BM25 score of the record's prompt and response for the example that they
      match best. It needs no policy.

    A record that did not train scores 0, and one that trained with a weight counts by it, over the round's mean weight.

    Args:
        run: a run of an agent whose policy can be built again, finished or not; or a run of `whence llm train`, for
            "bm25" any run of a language model.
        behaviour: actions in states, `Examples`, or the `round` and `record_id` of stored records; a positive score
            speaks for the mean over them. Stored records that are asked about get no scores themselves.
        rounds: the rounds to score, from 1; None: all whose policy is there, for "bm25" all.
        method: a method by name.
        env: the environment of an agent whose configuration does not name it; see `whence.stored.load_round`.
        on_round: called after each round.

    Returns:
        A row for each record: `round`, `record_id`, its `score`, and the columns of the run's records that say what was
        done there and where. A language model's have `log_prob`, too: the responses' mean one under the round's policy,
        null for "bm25".

    Raises:
        WhenceError: the method is unknown, the behaviour does not fit the run, or the run was not made by the command.
        RunDirectoryError: the run holds no rounds, or the policy of a round was not kept or cannot be built again.
    """
    stored = behaviour if isinstance(behaviour, pl.DataFrame) else None
    if stored is not None and not run.is_language:
        from whence.causes.decisions import read_actions

        behaviour = read_actions(run, stored, env=env)
    if isinstance(behaviour, Action):
        check_kind(run, agents={"Action": behaviour})
        from whence.causes.decisions import find_decision_causes

        causes = find_decision_causes(run, behaviour, rounds=rounds, method=method, env=env, on_round=on_round)
    else:
        check_kind(run, agents={"env": env}, language={"Examples": behaviour})
        # Transformers takes seconds to import.
        from whence.causes.response_causes import find_response_causes

        causes = find_response_causes(run, behaviour, rounds=rounds, method=method, on_round=on_round)
    # A stored record that is asked about would speak for itself.
    return causes if stored is None else causes.join(stored, on=KEYS, how="anti")


def check_kind(
    run: RunDirectory, *, agents: Mapping[str, Any] | None = None, language: Mapping[str, Any] | None = None
) -> None:
    """Refuse options that are for runs of the other kind, by their names; None and False are not given."""
    kind, others = ("a language model", "agents") if run.is_language else ("an agent", "language models")
    for name, value in ((agents if run.is_language else language) or {}).items():
        if value is not None and value is not False:
            raise WhenceError(f"{run.path} is a run of {kind}, and {name} is for {others}: leave it out.")
