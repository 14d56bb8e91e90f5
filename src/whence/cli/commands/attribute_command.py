"""`whence attribute`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from stable_baselines3 import PPO

from whence import stored
from whence.cli.terminal import console, find_round, make_table, options, print_json, print_line
from whence.core import Action, RecordBatch, Return, Target, WhenceError
from whence.runs import RunDirectory
from whence.scores import attribute as attribute_records
from whence.scores import is_significant, list_observations, usable_folds
from whence.stored.agents import read_objective


def attribute(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent, finished or not.")],
    round: Annotated[int | None, options.optional(help="The round to explain, from 1. (default: the last)")] = None,
    target: options.Target = "return",
    record: options.Record = None,
    observation: options.Observation = None,
    action: options.Action = None,
    engine: options.Engine = "auto",
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
    trust: options.Trust = False,
    top: Annotated[int, typer.Option(help="Records to show from either end.", min=1)] = 10,
    out: Annotated[Path | None, options.optional(help="Write all scores to this file: .parquet.")] = None,
    json: options.AsJson = False,
) -> None:
    """Tell which records of a round raised a target, and which lowered it.

    The policy that collected the round is built again from the run directory. A positive score says that training on
    the record raises the target.

    Example: whence attribute runs/lander --round 5 --target action --record 8210
    """
    if out is not None and out.suffix != ".parquet":
        raise WhenceError(f"--out is {out}; its name has to end in .parquet.")
    directory = RunDirectory.open(run, trust=trust)
    if directory.is_language:
        raise WhenceError(
            f"{run} is a run of a language model, and this command scores the runs of agents. The scores of its "
            f"responses are in {run / 'records'}; see them with: whence report {run}"
        )
    number = find_round(directory, round, None)
    model, records = stored.load_round(directory, number, env=env)
    explained = _make_target(target, model, records, record, observation, action)
    influence = attribute_records(
        model.policy,
        records,
        target=explained,
        objective=read_objective(model),
        engine=engine,
        folds=usable_folds(explained, records),
    )
    scored = records.to_polars(observations=True).join(influence.to_polars(), on="record_id", maintain_order="left")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        scored.write_parquet(out)
    scored = scored.drop("score_folds", "fold", strict=False)  # for groups in tables, not for people to read
    parts = {"lowest": influence.bottom(top), "highest": influence.top(top)}
    tables = {end: pl.DataFrame({"record_id": part.record_ids.tolist()}) for end, part in parts.items()}
    ends = {end: ids.join(scored, "record_id", "left", maintain_order="left").to_dicts() for end, ids in tables.items()}
    if json:
        print_json({"run": str(run), "round": number, "target": influence.target, "engine": influence.engine, **ends})
        return
    print_line(f"Round {number} of {run}: {len(records)} records, target {influence.target}, engine {influence.engine}")
    # A Dict observation has a column for each key.
    observations = list_observations(scored.columns)
    shown = ("record_id", "episode_id", "step", *observations, "action", "advantage")
    columns = [name for name in shown if name in scored.columns]
    for end, verb in (("lowest", "lowers"), ("highest", "raises")):
        rows = [[*(_shorten(row[column]) for column in columns), _describe_score(row)] for row in ends[end]]
        title = f"The {len(rows)} {end}: training on them {verb} the target"
        console.print(make_table(title, [*columns, "score"], rows))
    if influence.errors is not None:
        share = float(influence.is_significant().double().mean())
        print_line(f"Two errors (±) are a 95% interval. ?: no measurable difference from 0 ({share:.0%} have one).")
        print_line(f"`whence show {run} --round {number} --bottom {top}` and the page list moments, the surest first.")
    if out is not None:
        print_line(f"All scores: {out}")


def _make_target(
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
        return options.parse_decision(observation, action, model)
    if observation is not None or action is not None:
        raise WhenceError("Give --record, or --observation and --action; not both.")
    where = (records.ids == record).nonzero().flatten()
    if len(where) != 1:
        first, last = int(records.ids.min()), int(records.ids.max())
        raise WhenceError(f"Record {record} is not in this round; its records go from {first} to {last}.")
    single = records.take(where)
    return Action(single.observations, single.actions)


def _describe_score(row: Mapping[str, Any]) -> str:
    """Return a score with its error, marked if it cannot be told from 0."""
    score, error = row["score"], row.get("error")
    if error is None:
        return f"{score:.4g}"
    return f"{score:.3g} ± {error:.2g}{' ?' if is_significant(score, error) is False else ''}"


def _shorten(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_shorten(entry) for entry in value[:6]) + (", …]" if len(value) > 6 else "]")
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
