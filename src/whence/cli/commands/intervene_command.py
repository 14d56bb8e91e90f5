"""`whence intervene`."""

import json as json_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from rich.table import Table
from stable_baselines3 import PPO

from whence import experiments
from whence.attribution import attribute
from whence.cli import options
from whence.cli.console import console, errors, make_table, print_json, print_line, resumable
from whence.cli.options import parse_rounds
from whence.cli.runs import make_target, open_agent_run
from whence.counterfactual import intervene as intervene_round
from whence.counterfactual import leave_out_group
from whence.counterfactual.interventions import VARIANTS, mean_change, summarise_changes
from whence.counterfactual.retrain import check_memory
from whence.errors import RunDirectoryError, WhenceError, first_line, suggest
from whence.experiments import measure_returns, state_names
from whence.guards import write_atomically
from whence.influence import Influence
from whence.moments import read_axes
from whence.page.explored_run import name_run
from whence.rounds import DRAWS, METHODS, RoundRecording, attribute_round
from whence.runs import RunDirectory, check_links
from whence.sb3 import model_objective
from whence.targets import Target

_EXAMPLE = '"action = 2 and advantage < 0"'
_METHODS = ("snapshot", *METHODS)
_CHANGED = tuple(variant for variant in VARIANTS if variant != "full")

MakeTarget = Callable[[PPO, RoundRecording], Target]
"""Makes the target of a round."""


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
    target: options.Target = "return",
    record: options.Record = None,
    observation: options.Observation = None,
    action: options.Action = None,
    method: Annotated[str, typer.Option(help=f"How the records are scored: {', '.join(_METHODS)}.")] = "snapshot",
    draws: options.Draws = DRAWS,
    orders: Annotated[int, typer.Option(help="Orders in which each is trained.", min=1)] = 1,
    test_episodes: Annotated[int, typer.Option(help="Episodes to test each trained policy by.", min=2)] = 200,
    seed: Annotated[int, typer.Option(help="Of draws, orders, random drops and tests.", min=0)] = 0,
    env: options.ReplayEnv = None,
    memory: options.Memory = 2.0,
    json: options.AsJson = False,
) -> None:
    """Train recorded rounds again without the records that score below 0, and tell what that does to test returns.

    Each round by itself, from where it began: on all records, without those below 0, and without as many at random.
    With --where, without those of a kind; and the policy's probability of what they did is measured as well. Written to
    interventions/ in the run; interrupted, the same command goes on.

    Example: whence intervene runs/lander --rounds 10-50
    """
    directory = open_agent_run(run)
    check_links(directory.path)
    numbers = _choose_rounds(directory, rounds)
    if method not in _METHODS:
        raise WhenceError(f"--method is {method!r}.{suggest(method, _METHODS)}")
    if record is not None and len(numbers) > 1:
        raise WhenceError(
            f"--record is of one round, and {len(numbers)} are asked for: give its round as --rounds, or "
            "--observation and --action."
        )
    settings: dict[str, Any] = {"method": method, "orders": orders, "test_episodes": test_episodes, "seed": seed}
    settings |= {} if where is None else {"where": where}
    if method == "smoothed":
        settings["draws"] = draws

    def make(model: PPO, recording: RoundRecording) -> Target:
        return make_target(target, model, recording.records, record, observation, action)

    torch.set_num_threads(1)
    contents = []
    with resumable(), errors.status("reading") as status:
        for place, number in enumerate(numbers, start=1):
            on_stage = _prefix_stages(status.update, f"round {number}, {place} of {len(numbers)}")
            contents.append(_intervene(directory, number, make, settings, int(memory * 2**30), on_stage, env))
    if where is not None:
        _show_groups(directory, contents, settings, json=json)
        return
    rows = [_summarise_round(content) for content in contents]
    means = {variant: mean_change(_changes(rows, variant)) for variant in _CHANGED}
    name = str(directory.config.get("env") or directory.path.name)
    if json:
        print_json({"run": str(run), "target": contents[0]["target"], **settings, "rounds": rows, "mean_change": means})
    else:
        title = f"{name}, {name_run(directory)}: test returns, records scored by {method}"
        console.print(make_table(title, _HEADINGS, map(_format_row, rows)))
        for text in _describe(rows, means):
            print_line(text)
        print_line(f"Numbers: {directory.path / 'interventions'}")


def _prefix_stages(on_stage: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda stage: on_stage(f"{prefix}: {stage}")


def _choose_rounds(directory: RunDirectory, text: str | None) -> list[int]:
    """Return the rounds to intervene in.

    Raises:
        RunDirectoryError: no round was recorded, or not one that the option names.
    """
    if not (recorded := directory.rounds("recordings")):
        raise RunDirectoryError(
            f"No round of {directory.path} was recorded. Train into another directory with --record-rounds 5,20 or "
            "--record-rounds 10-150:10."
        )
    numbers = recorded if text is None else parse_rounds("--rounds", text)
    if missing := [number for number in numbers if number not in recorded]:
        raise RunDirectoryError(
            f"Round {missing[0]} of {directory.path} was not recorded. Recorded rounds: "
            f"{', '.join(map(str, recorded))}. Leave --rounds out for all of them, or train with --record-rounds."
        )
    return numbers


def _intervene(
    directory: RunDirectory,
    number: int,
    make: MakeTarget,
    settings: Mapping[str, Any],
    memory: int,
    on_stage: Callable[[str], None],
    env: str | None,
) -> Mapping[str, Any]:
    """Return the content of a round's file; write the file unless one with the same settings is there."""
    model, recording = experiments.load_recording(directory, number, env=env)
    target = make(model, recording)
    content = {"round": number, "records": recording.records.fingerprint, "target": repr(target), **settings}
    ending = "_where" if "where" in settings else ""
    file = directory.path / "interventions" / f"round_{number:05d}{ending}.json"
    if (before := _read_content(file)) is not None and content.items() <= before.items():
        return before
    # Each round has its own seeds: otherwise the rounds' errors would be alike, and their mean no better than one.
    seeds = np.random.SeedSequence([settings["seed"], number]).generate_state(3)
    orders_seed, tests_seed, draws_seed = map(int, seeds)
    check_memory(model.policy, recording, torch.ones(len(VARIANTS), len(recording.records), dtype=torch.bool), memory)
    on_stage("scoring")
    draws = settings.get("draws", DRAWS)
    scores = _score(model, recording, target, settings["method"], draws=draws, seed=draws_seed, memory=memory)
    group = None
    if "where" in settings:
        group = _find_group(directory, number, scores, settings["where"])
        content["group"] = describe_group(group)
    tests = measure_returns(directory, model, episodes=settings["test_episodes"], seed=tests_seed, env=env)
    with tests as evaluate:
        repeats = {"orders": settings["orders"], "seed": orders_seed, "memory": memory, "on_stage": on_stage}
        if group is None:
            results = intervene_round(model.policy, recording, scores, evaluate, **repeats)
        else:
            ids = group["record_id"].to_list()
            results = leave_out_group(model.policy, recording, ids, evaluate=evaluate, **repeats)
    content["rows"] = results.to_dicts()
    with write_atomically(file) as temporary:
        temporary.write_text(json_module.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def _read_content(file: Path) -> Mapping[str, Any] | None:
    try:
        content = json_module.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, RecursionError, ValueError):  # a damaged file is replaced, like one with other settings
        return None
    return content if isinstance(content, dict) else None


def _score(
    model: PPO, recording: RoundRecording, target: Target, method: str, *, draws: int, seed: int, memory: int
) -> Influence:
    if method == "snapshot":
        objective = model_objective(model)
        return attribute(model.policy, recording.records, target=target, objective=objective, memory=memory)
    scores = attribute_round(
        model.policy, recording, target=target, method=method, draws=draws, seed=seed, memory=memory
    )
    assert not isinstance(scores, list)
    return scores


def _find_group(directory: RunDirectory, number: int, scores: Influence, where: str) -> pl.DataFrame:
    """Return the records of a round for which a condition holds, with these scores."""
    table = directory.round("records", number)
    table = table.drop(name for name in ("score", "error") if name in table.columns)
    table = table.join(scores.to_polars(), on="record_id", how="left", maintain_order="left")
    return find_group(table, where, state_names(directory.config.get("env")))


def _show_groups(
    directory: RunDirectory, contents: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, json: bool
) -> None:
    """Print what leaving out a group did in each round."""
    rounds = [(content, summarise_group(content)) for content in contents]
    if json:
        about = {"run": str(directory.path), "target": contents[0]["target"], **settings}
        rows = [{"round": content["round"], **content["group"], "outcomes": rows} for content, rows in rounds]
        print_json(about | {"rounds": rows})
        return
    for content, rows in rounds:
        console.print(make_group_outcomes(content, rows))
    print_line("Probability: how likely the policy does what these records did, on average.")
    if settings["orders"] > 1:
        print_line(f"In brackets: 95% t interval over {settings['orders']} orders.")
    print_line(f"Numbers: {directory.path / 'interventions'}")


def _summarise_round(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round's results, as means over its orders."""

    def mean(variant: str, name: str) -> float | None:
        values = [row[name] for row in content["rows"] if row["variant"] == variant and row[name] is not None]
        return fmean(values) if values else None

    sizes = {row["variant"]: row["kept"] for row in content["rows"]}
    return {
        "round": content["round"],
        "records": sizes["full"],
        "kept": sizes["filtered"],
        **{variant: mean(variant, "outcome") for variant in VARIANTS},
        **{f"change_{variant}": mean(variant, "change") for variant in _CHANGED},
    }


def _changes(rows: Iterable[Mapping[str, Any]], variant: str) -> list[float]:
    changes = (row[f"change_{variant}"] for row in rows)
    return [change for change in changes if change is not None]


_HEADINGS = ("round", "kept", *VARIANTS, *(f"{variant} − full" for variant in _CHANGED))


def _format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    def text(name: str, form: str) -> str:
        return "–" if row[name] is None else format(row[name], form)

    returns = [text(variant, ".4g") for variant in VARIANTS]
    changes = [text(f"change_{variant}", "+.4g") for variant in _CHANGED]
    return str(row["round"]), f"{row['kept']} of {row['records']}", *returns, *changes


def _describe(rows: Sequence[Mapping[str, Any]], means: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the results of all rounds, in lines."""
    lines = []
    for variant, mean in means.items():
        if mean["mean"] is not None:
            interval = "" if mean["low"] is None else f" [{mean['low']:+.4g}, {mean['high']:+.4g}]"
            better = f"better in {mean['improved']} of {mean['rounds']} rounds"
            lines.append(f"Mean change, {variant}: {mean['mean']:+.4g}{interval}, {better}")
    if skipped := [str(row["round"]) for row in rows if row["filtered"] is None]:
        lines.append(f"Skipped, since fewer than two records would be left: round {', '.join(skipped)}")
    if any(mean["low"] is not None for mean in means.values()):
        lines.append("In brackets: 95% t interval over rounds.")
    return lines


_NAMES = {"probability": "probability", "evaluated": "test return"}


def find_group(records: pl.DataFrame, where: str, names: Sequence[str] | None) -> pl.DataFrame:
    """Return the records for which a condition holds.

    Args:
        records: a round's table, with scores.
        where: the condition, in SQL, over the table's columns and the axes of its observations.
        names: names of these axes; None: x0, x1, ….

    Raises:
        WhenceError: the condition cannot be read, names a column that is not there, is no condition, or holds for no
            record.
    """
    axes = read_axes(records, names)
    plain = records.drop(name for name in records.columns if name.split(".")[0] == "observation")
    table = plain.with_columns(pl.Series(name, values) for name, values in axes.items())
    try:
        condition = table.with_columns(__condition__=pl.sql_expr(where))["__condition__"]
    except pl.exceptions.PolarsError as refusal:
        raise WhenceError(
            f"--where is {where!r}: {first_line(refusal)}. Write a condition in SQL, such as {_EXAMPLE}, over "
            f"{', '.join(table.columns)}; names with spaces in double quotes."
        ) from None
    if condition.dtype != pl.Boolean:
        raise WhenceError(
            f"--where is {where!r}, which is no condition but {condition.dtype}. Write one such as {_EXAMPLE}."
        )
    group = table.filter(condition.fill_null(False))
    if group.is_empty():
        raise WhenceError(f"--where is {where!r}, which holds for none of the round's {len(table)} records.")
    return group


def describe_group(group: pl.DataFrame) -> dict[str, Any]:
    """Return a group's size and what it scores, in JSON types."""
    scores = group["score"].cast(pl.Float64).to_numpy()
    return {
        "records": len(group),
        "mean_score": float(scores.mean()),
        "share_negative": float((scores < 0).mean()),
    }


def summarise_group(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what leaving a group out did in a round: for each outcome, means of the variants and their differences."""
    table = pl.DataFrame(content["rows"])
    changes = summarise_changes(table).to_dicts()
    rows = []
    for outcome in table["outcome"].unique(maintain_order=True):
        of_outcome = table.filter(pl.col("outcome") == outcome)
        means = {variant: of_outcome.filter(pl.col("variant") == variant)["value"].mean() for variant in VARIANTS}
        differences = {
            row["difference"]: {end: row[end] for end in ("mean", "low", "high")}
            for row in changes
            if row["outcome"] == outcome
        }
        rows.append({"outcome": outcome, **means, **differences})
    return rows


def make_group_outcomes(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a round's table: the means of each outcome, and what the group changed compared with a random one."""
    about = content["group"]
    title = (
        f"Round {content['round']} without {about['records']} records: {content['where']}\n"
        f"They score {about['mean_score']:.3g} on average, {about['share_negative']:.0%} of them below 0"
    )
    headings = ["", *VARIANTS, "filtered − full", "filtered − random"]
    cells = [
        [
            _NAMES[row["outcome"]],
            *(f"{row[variant]:.3g}" for variant in VARIANTS),
            *(_format_interval(row[difference]) for difference in ("filtered - full", "filtered - random")),
        ]
        for row in rows
    ]
    return make_table(title, headings, cells)


def _format_interval(interval: Mapping[str, float | None]) -> str:
    ends = "" if interval["low"] is None else f" [{interval['low']:+.2g}, {interval['high']:+.2g}]"
    return f"{interval['mean']:+.3g}{ends}"
