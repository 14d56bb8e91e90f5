"""The round that options name, and the target that they describe."""

import polars as pl
from stable_baselines3 import PPO

from whence.cli.terminal.options import parse_action
from whence.core import Action, RecordBatch, Return, Target, WhenceError
from whence.runs import RunDirectory
from whence.stored.agents import check_action


def find_round(run: RunDirectory, number: int | None, record: int | None) -> int:
    """Return the round asked for: by its number, by a record in it, or the last."""
    rounds = run.require_rounds()
    if number is not None or record is None:
        whole = set(run.rounds("policies")) or rounds  # of large policies not every round's is kept
        return max((each for each in rounds if each in whole), default=rounds[-1]) if number is None else number
    for candidate in reversed(rounds):
        if not run.round("records", candidate).filter(pl.col("record_id") == record).is_empty():
            return candidate
    raise WhenceError(
        f"No round of {run.path} holds record {record}; it holds rounds {rounds[0]} to {rounds[-1]}. See the moments "
        "of a round with: whence show RUN --bottom 10"
    )


def make_target(
    name: str, model: PPO, records: RecordBatch, record: int | None, observation: str | None, action: str | None
) -> Target:
    """Return the target that options describe, of a round's records and the model that collected it."""
    if name == "return":
        if (record, observation, action) != (None, None, None):
            raise WhenceError(
                "--record, --observation and --action belong to the target action; the target is return. "
                "Add --target action, or leave them out."
            )
        return Return()
    if record is None:
        return parse_decision(observation, action, model)
    if observation is not None or action is not None:
        raise WhenceError("Give --record, or --observation and --action; not both.")
    where = (records.ids == record).nonzero().flatten()
    if len(where) != 1:
        first, last = int(records.ids.min()), int(records.ids.max())
        raise WhenceError(f"Record {record} is not in this round; its records go from {first} to {last}.")
    single = records.take(where)
    return Action(single.observations, single.actions)


def parse_decision(observation: str | None, action: str | None, model: PPO) -> Action:
    """Return the target of an observation and an action, both as JSON and in the model's spaces."""
    if observation is None or action is None:
        raise WhenceError("An action is named by --record ID, or by both --observation and --action, as JSON.")
    target = Action(**parse_action(observation, action))
    check_action(target, model.observation_space, model.action_space)
    return target
