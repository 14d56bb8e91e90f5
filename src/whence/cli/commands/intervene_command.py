"""`whence intervene`."""

import json as json_module
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer

from whence import experiments
from whence.attribution import attribute
from whence.cli.terminal import (
    console,
    errors,
    make_table,
    open_agent_run,
    options,
    parse_rounds,
    print_json,
    print_line,
    resumable,
)
from whence.core import Return, RunDirectoryError, WhenceError, first_line, write_json
from whence.counterfactual import VARIANTS, summarise_changes
from whence.counterfactual import intervene as intervene_round
from whence.efficiency import t_interval
from whence.influence import Influence
from whence.moments import read_axes
from whence.runs import RunDirectory, check_links
from whence.sb3 import model_objective

_EXAMPLE = '"action = 2 and advantage < 0"'
_DIFFERENCES = ("filtered - full", "filtered - random")
_NAMES = {"probability": "probability", "evaluated": "test return"}


def intervene(
    run: Annotated[Path, typer.Argument(help="A run directory of `whence train --record-rounds`.")],
    rounds: Annotated[
        str | None,
        typer.Option(
            help="The recorded rounds: 5,20 or 10-50 or, every tenth, 10-150:10. (default: all that were recorded)",
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help=f"Leave out the records for which this condition holds, not those below 0: {_EXAMPLE}.",
            metavar="SQL",
            show_default=False,
        ),
    ] = None,
    orders: Annotated[int, typer.Option(help="Orders in which each is trained.", min=1)] = 1,
    test_episodes: Annotated[int, typer.Option(help="Episodes to test each trained policy by.", min=2)] = 200,
    seed: Annotated[int, typer.Option(help="Of orders, random drops and tests.", min=0)] = 0,
    env: options.ReplayEnv = None,
    trust: options.Trust = False,
    memory: options.Memory = 2.0,
    json: options.AsJson = False,
) -> None:
    """Train recorded rounds again without the records that score below 0, and tell what that does to test returns.

    Each round by itself, from where it began: on all records, without those below 0, and without as many at random.
    With --where, without those of a kind; and the policy's probability of what they did is measured as well. Written to
    interventions/ in the run; interrupted, the same command goes on.

    Example: whence intervene runs/lander --rounds 10-50
    """
    directory = open_agent_run(run, trust=trust)
    check_links(directory.path)
    numbers = directory.rounds("recordings") if rounds is None else parse_rounds("--rounds", rounds)
    if not numbers:
        raise RunDirectoryError(
            f"No round of {directory.path} was recorded. Train into another directory with --record-rounds 5,20 or "
            "--record-rounds 10-150:10."
        )
    settings = {"where": where, "orders": orders, "test_episodes": test_episodes, "seed": seed}

    def show(number: int, stage: str) -> None:
        status.update(f"round {number}: {stage}")

    torch.set_num_threads(1)
    with resumable(), errors.status("reading") as status:
        contents = [
            _intervene(directory, number, settings, int(memory * 2**30), partial(show, number), env)
            for number in numbers
        ]
    rows = [row for content in contents for row in _summarise_round(content)]
    tested = [row for row in rows if row["outcome"] == "evaluated" and row["filtered"] is not None]
    means = {difference: t_interval([row[difference]["mean"] for row in tested]) for difference in _DIFFERENCES}
    if json:
        print_json({"run": str(run), **settings, "rounds": rows, "mean_change": means})
        return
    title = f"{run}: without the records that score below 0" if where is None else f"{run}: without {where}"
    headings = ("round", "kept", "outcome", *VARIANTS, *(name.replace("-", "−") for name in _DIFFERENCES))
    console.print(make_table(title, headings, map(_format_row, rows)))
    for difference, interval in means.items():
        print_line(f"Mean of the test returns over {len(tested)} rounds, {difference}: {_format_interval(interval)}")
    print_line("In brackets: 95% t intervals, over orders or rounds. Probability: of what the left-out records did.")
    print_line(f"Numbers: {directory.path / 'interventions'}")


def _intervene(
    directory: RunDirectory,
    number: int,
    settings: Mapping[str, Any],
    memory: int,
    on_stage: Callable[[str], None],
    env: str | None,
) -> Mapping[str, Any]:
    """Return the content of a round's file; write the file unless one with the same settings is there."""
    model, recording = experiments.load_recording(directory, number, env=env)
    where = settings["where"]
    content = {"round": number, "records": recording.records.fingerprint, **settings}
    file = directory.path / "interventions" / f"round_{number:05d}{'_where' if where else ''}.json"
    try:
        before = json_module.loads(file.read_text(encoding="utf-8"))
        if content.items() <= before.items():
            return before  # type: ignore[no-any-return]
    except (AttributeError, FileNotFoundError, ValueError):  # A damaged file is replaced, like one with other settings.
        pass
    # Each round has its own seeds: otherwise the rounds' errors would be alike, and their mean no better than one.
    orders_seed, tests_seed = map(int, np.random.SeedSequence([settings["seed"], number]).generate_state(2))
    on_stage("scoring")
    objective = model_objective(model)
    scores = attribute(model.policy, recording.records, target=Return(), objective=objective, memory=memory)
    left_out = scores if where is None else _find_group(directory, number, scores, where)
    tests = experiments.measure_returns(
        directory, model, number, episodes=settings["test_episodes"], seed=tests_seed, env=env
    )
    with tests as evaluate:
        results = intervene_round(
            model.policy,
            recording,
            left_out,
            evaluate=evaluate,
            orders=settings["orders"],
            seed=orders_seed,
            memory=memory,
            on_stage=on_stage,
        )
    content["rows"] = results.to_dicts()
    write_json(file, content)
    return content


def _find_group(directory: RunDirectory, number: int, scores: Influence, where: str) -> list[int]:
    """Return the ids of the records for which a condition holds, over columns, scores and axes of observations."""
    records = directory.round("records", number).drop("score", "error", "score_folds", "fold", strict=False)
    records = records.join(scores.to_polars(), on="record_id", how="left", maintain_order="left")
    axes = read_axes(records, experiments.state_names(directory.config.get("env"), directory.config))
    plain = records.drop(name for name in records.columns if name.split(".")[0] in ("observation", "raw_observation"))
    table = plain.with_columns(pl.Series(name, values) for name, values in axes.items())
    try:
        group = table.filter(pl.sql_expr(where))
    except pl.exceptions.PolarsError as refusal:
        raise WhenceError(
            f"--where is {where!r}: {first_line(refusal)}. Write a condition in SQL, such as {_EXAMPLE}, over "
            f"{', '.join(table.columns)}; names with spaces in double quotes."
        ) from None
    if group.is_empty():
        raise WhenceError(f"--where is {where!r}, which holds for none of the round's {len(table)} records.")
    return group["record_id"].to_list()


def _summarise_round(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each outcome: means of the variants, and their differences with intervals over orders."""
    table = pl.DataFrame(content["rows"])
    kept = dict(table.select("variant", "kept").iter_rows())
    about = {"round": content["round"], "records": kept["full"], "kept": kept["filtered"]}
    rows: dict[str, dict[str, Any]] = {}
    for outcome, variant, mean in (
        table.group_by("outcome", "variant", maintain_order=True).agg(pl.col("value").mean()).iter_rows()
    ):
        rows.setdefault(outcome, {**about, "outcome": outcome})[variant] = mean
    for change in summarise_changes(table).to_dicts():
        rows[change["outcome"]][change["difference"]] = {end: change[end] for end in ("mean", "low", "high")}
    return list(rows.values())


def _format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    means = ("–" if row[variant] is None else f"{row[variant]:.4g}" for variant in VARIANTS)
    differences = (_format_interval(row[difference]) for difference in _DIFFERENCES)
    return str(row["round"]), f"{row['kept']} of {row['records']}", _NAMES[row["outcome"]], *means, *differences


def _format_interval(interval: Mapping[str, float | None]) -> str:
    if interval["mean"] is None:
        return "–"
    ends = "" if interval["low"] is None else f" [{interval['low']:+.3g}, {interval['high']:+.3g}]"
    return f"{interval['mean']:+.4g}{ends}"
