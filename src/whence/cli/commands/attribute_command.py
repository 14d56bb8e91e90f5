"""`whence attribute`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
import typer

from whence import experiments
from whence.attribution import attribute as attribute_records
from whence.cli import options
from whence.cli.console import console, make_table, print_json, print_line
from whence.cli.runs import make_target, open_agent_run
from whence.errors import WhenceError
from whence.folds import usable_folds
from whence.influence import is_significant
from whence.sb3 import model_objective


def attribute(
    run: Annotated[
        Path, typer.Argument(help="A run directory: of `whence train`, `whence compare`, or of a callback.")
    ],
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
    env: options.ReplayEnv = None,
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
    directory = open_agent_run(run)
    rounds = directory.require_rounds()
    number = rounds[-1] if round is None else round
    _check_out(out)
    model, records = experiments.load_round(directory, number, env=env)
    made_target = make_target(target, model, records, record, observation, action)
    influence = attribute_records(
        model.policy,
        records,
        target=made_target,
        objective=model_objective(model),
        engine=engine or "auto",
        folds=usable_folds(made_target, records),
    )
    scored = records.to_polars(observations=True).join(influence.to_polars(), on="record_id", maintain_order="left")
    if out is not None:
        _write_scores(scored, influence, out)
    count = min(top, len(records))
    ordered = [
        ("lowest: training on them lowers the target", influence.bottom(count)),
        ("highest: training on them raises the target", influence.top(count)),
    ]
    if json:
        ends = {name.partition(":")[0]: _take_rows(scored, end.record_ids) for name, end in ordered}
        print_json({"run": str(run), "round": number, "target": influence.target, "engine": influence.engine, **ends})
        return
    print_line(f"Round {number} of {run}: {len(records)} records, target {influence.target}, engine {influence.engine}")
    observations = [
        name for name in scored.columns if name.split(".")[0] == "observation"
    ]  # of a Dict one for each key
    shown = ("record_id", "episode_id", "step", *observations, "action", "advantage")
    columns = [name for name in shown if name in scored.columns]
    for name, end in ordered:
        rows = [
            [*(_shorten(row[column]) for column in columns), _describe_score(row)]
            for row in _take_rows(scored, end.record_ids)
        ]
        console.print(make_table(f"The {count} {name}", [*columns, "score"], rows))
    if influence.errors is not None:
        share = float(influence.is_significant().double().mean())
        print_line(f"± is one standard error. ?: cannot be told from 0; {share:.0%} of all scores can.")
    if out is not None:
        print_line(f"All scores: {out}")


def _check_out(out: Path | None) -> None:
    if out is not None and out.suffix not in (".parquet", ".csv", ".safetensors"):
        raise WhenceError(f"--out is {out}; its name has to end in .parquet, .csv or .safetensors.")


def _write_scores(scored: pl.DataFrame, influence: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".safetensors":
        influence.save(out)
    elif out.suffix == ".parquet":
        scored.write_parquet(out)
    else:
        flat = [pl.col(name) for name, kind in scored.schema.items() if not kind.is_nested()]
        scored.select(flat).write_csv(out)


def _take_rows(scored: pl.DataFrame, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Return the rows of some records, in the records' order."""
    ordered = pl.DataFrame({"record_id": ids.tolist()})
    return ordered.join(scored, on="record_id", how="left", maintain_order="left").to_dicts()


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
