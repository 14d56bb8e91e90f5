"""`whence attribute`, `whence report` and `whence list`."""

from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
import typer
from stable_baselines3 import PPO

from whence import experiments
from whence.attribution import attribute as attribute_records
from whence.cli import options
from whence.cli.app import app
from whence.cli.output import console, line, print_json, table
from whence.engines import ENGINES
from whence.errors import WhenceError, nearest
from whence.experiments.plan import check_action
from whence.records import RecordBatch, as_numpy
from whence.report import write_report, write_run_report
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.targets import Action, Return, Target


@app.command()
def attribute(
    run: Annotated[Path, typer.Argument(help="A run directory of `whence train` or `whence compare`.")],
    round: Annotated[
        int | None, typer.Option(help="The round to explain, from 1. (default: the last)", show_default=False)
    ] = None,
    target: Annotated[
        str, typer.Option(help="What to explain: return, or action (of --record, or of --observation and --action).")
    ] = "return",
    record: options.Record = None,
    observation: options.Observation = None,
    action: options.Action = None,
    engine: options.Engine = None,
    top: Annotated[int, typer.Option(help="Records to show from either end.", min=1)] = 10,
    out: Annotated[
        Path | None,
        typer.Option(help="Write all scores to this file (.parquet, .csv or .safetensors).", show_default=False),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Tell which records of a round raised a target, and which lowered it.

    The policy that collected the round is built again from the run directory. A positive score says that training on
    the record raises the target.

    Example: whence attribute runs/lander --round 5 --target action --record 8210
    """
    directory = RunDirectory.open(run)
    rounds = directory.rounds()
    if not rounds:
        raise WhenceError(f"{run} holds no rounds yet.")
    number = rounds[-1] if round is None else round
    _check_out(out)
    model, records = experiments.load_round(directory, number)
    influence = attribute_records(
        model.policy,
        records,
        target=asked_target(target, model, records, record, observation, action),
        objective=model_objective(model),
        engine=engine or "auto",
    )
    scored = records.to_polars(observations=True).with_columns(score=pl.Series(as_numpy(influence.scores)))
    if out is not None:
        _write(scored, influence, out)
    count = min(top, len(records))
    ordered = [
        ("lowest: training on them lowers the target", influence.bottom(count)),
        ("highest: training on them raises the target", influence.top(count)),
    ]
    if json:
        ends = {name.partition(":")[0]: _rows(scored, one.record_ids) for name, one in ordered}
        print_json({"run": str(run), "round": number, "target": influence.target, "engine": influence.engine, **ends})
        return
    line(f"Round {number} of {run}: {len(records)} records, target {influence.target}, engine {influence.engine}")
    wanted = ("record_id", "episode_id", "step", "observation", "action", "advantage", "score")
    columns = [name for name in wanted if name in scored.columns]
    for name, one in ordered:
        rows = [[_short(row[column]) for column in columns] for row in _rows(scored, one.record_ids)]
        console.print(table(f"The {count} {name}", columns, rows))
    if out is not None:
        line(f"All scores: {out}")


def asked_target(
    name: str, model: PPO, records: RecordBatch, record: int | None, observation: str | None, action: str | None
) -> Target:
    """Return the target that options ask for."""
    if name not in experiments.TARGETS:
        raise WhenceError(f"The target {name!r} is unknown.{nearest(name, experiments.TARGETS)}")
    if name == "return":
        if (record, observation, action) != (None, None, None):
            raise WhenceError("--record, --observation and --action belong to the target action; the target is return.")
        return Return()
    if record is not None:
        if observation is not None or action is not None:
            raise WhenceError("Give --record, or --observation and --action; not both.")
        where = (records.ids == record).nonzero().flatten()
        if len(where) != 1:
            first, last = int(records.ids.min()), int(records.ids.max())
            raise WhenceError(f"Record {record} is not in this round; its records go from {first} to {last}.")
        one = records.take(slice(int(where[0]), int(where[0]) + 1))
        return Action(one.observations, one.actions)
    if observation is None or action is None:
        raise WhenceError("The target action needs --record ID, or --observation and --action as JSON.")
    asked = Action(**options.action_asked(observation, action))
    check_action(asked, model.observation_space, model.action_space)
    return asked


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in (".parquet", ".csv", ".safetensors"):
        raise WhenceError(f"--out is {out}; its name has to end in .parquet, .csv or .safetensors.")


def _write(scored: pl.DataFrame, influence: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors":
        influence.save(out)
    elif out.suffix == ".parquet":
        scored.write_parquet(out)
    else:
        flat = [pl.col(name) for name, kind in scored.schema.items() if not kind.is_nested()]
        scored.select(flat).write_csv(out)


def _rows(scored: pl.DataFrame, ids: torch.Tensor) -> list[dict[str, Any]]:
    wanted = pl.DataFrame({"record_id": ids.tolist()})
    return wanted.join(scored, on="record_id", how="left", maintain_order="left").to_dicts()


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_short(one) for one in value[:6]) + (", …]" if len(value) > 6 else "]")
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@app.command()
def report(
    path: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: report.html in PATH)", show_default=False)
    ] = None,
) -> None:
    """Write the page of a run or a comparison: one HTML file that needs no network.

    It shows the rounds so far where a run is not finished.

    Example: whence report runs/lander
    """
    out = out or path / "report.html"
    if (path / "comparison.json").exists():
        write_report(experiments.load(path), out)
    elif (path / "runs").is_dir() and not (path / "config.json").exists():
        raise WhenceError(
            f"{path} holds a comparison that is not finished. Run its `whence compare` again, or give one of the runs "
            f"in {path / 'runs'}."
        )
    else:
        write_run_report(RunDirectory.open(path), out)
    line(str(out))


_ENGINES = {
    "auto": "ghost where every layer has a rule, else forward, else vmap, else loop",
    "ghost": "one forward and backward pass, products layer by layer; no per-record gradient",
    "forward": "forward-mode differentiation; every layer whose kernels have it",
    "vmap": "per-record gradients, many at a time; much memory",
    "loop": "one record after the other; the truth the others are tested against",
}
_TARGETS = {
    "return": "the expected return's stand-in, mean(log-prob times advantage) over the round",
    "action": "the log-probability of an action in an observation",
}


@app.command(name="list")
def list_(
    what: Annotated[
        str | None,
        typer.Argument(help="arms, presets, engines or targets; all where none is given.", show_default=False),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Name the arms, presets, engines and targets there are.

    Example: whence list arms
    """
    found = {
        "arms": {name: arm.about for name, arm in experiments.ARMS.items()},
        "presets": {
            name: f"{values['env']}, {values['rounds']} rounds, {values['optimizer']}"
            for name, values in experiments.presets().items()
        },
        "engines": {name: _ENGINES.get(name, "registered by another package") for name in ("auto", *ENGINES)},
        "targets": {name: _TARGETS[name] for name in experiments.TARGETS},
    }
    if what is not None and what not in found:
        raise WhenceError(f"There are no {what!r} to list.{nearest(what, found)}")
    shown = found if what is None else {what: found[what]}
    if json:
        print_json(shown)
        return
    for kind, entries in shown.items():
        console.print(table(kind, ("name", "what it is"), entries.items()))
