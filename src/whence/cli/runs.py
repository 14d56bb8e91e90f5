"""The run that a command opens, and the target that its options describe."""

from pathlib import Path

from stable_baselines3 import PPO

from whence.cli.options import parse_action
from whence.errors import WhenceError, suggest
from whence.experiments import TARGETS, check_action
from whence.records import RecordBatch
from whence.runs import RunDirectory
from whence.targets import Action, Return, Target


def open_agent_run(path: Path) -> RunDirectory:
    """Open the run of an agent, whose policy can be built again.

    Raises:
        RunDirectoryError: there is no run.
        WhenceError: it is a language model's.
    """
    directory = RunDirectory.open(path)
    if directory.is_language:
        raise WhenceError(
            f"{path} is a language-model run, and this command scores the runs of agents. The scores of its responses "
            f"are in {path / 'records'}; see them with: whence report {path}"
        )
    return directory


def make_target(
    name: str, model: PPO, records: RecordBatch, record: int | None, observation: str | None, action: str | None
) -> Target:
    """Return the target that options describe.

    Args:
        name: a key of `TARGETS`.
        model: the model that collected the round.
        records: the round's records.
        record: the id of the record whose action is the target, or
        observation: an observation as JSON, with
        action: an action as JSON.

    Raises:
        WhenceError: options that do not go together, or a record, an observation or an action that is not there.
    """
    if name not in TARGETS:
        raise WhenceError(f"The target {name!r} is unknown.{suggest(name, TARGETS)}")
    if name == "return":
        if (record, observation, action) != (None, None, None):
            raise WhenceError(
                "--record, --observation and --action belong to the target action; the target is return. "
                "Add --target action, or leave them out."
            )
        return Return()
    if record is not None:
        if observation is not None or action is not None:
            raise WhenceError("Give --record, or --observation and --action; not both.")
        where = (records.ids == record).nonzero().flatten()
        if len(where) != 1:
            first, last = int(records.ids.min()), int(records.ids.max())
            raise WhenceError(f"Record {record} is not in this round; its records go from {first} to {last}.")
        single = records.take(slice(int(where[0]), int(where[0]) + 1))
        return Action(single.observations, single.actions)
    if observation is None or action is None:
        raise WhenceError("The target action needs --record ID, or --observation and --action as JSON.")
    target = Action(**parse_action(observation, action))
    check_action(target, model.observation_space, model.action_space)
    return target
