"""`whence counterfactual`."""

import json as json_module
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
import typer
from rich.table import Table

from whence import experiments
from whence.cli import options
from whence.cli.console import console, errors, make_table, print_json, print_line
from whence.cli.runs import make_target, open_agent_run
from whence.counterfactual import leave_out, study
from whence.counterfactual.removals import SHARES, check_removals
from whence.counterfactual.scores import MOST
from whence.errors import WhenceError
from whence.experiments import measure_returns
from whence.guards import write_atomically
from whence.rounds import DRAWS
from whence.runs import check_links


def counterfactual(
    run: Annotated[Path, typer.Argument(help="A run directory with recorded rounds.")],
    round: Annotated[int, typer.Option(help="The recorded round, from 1.")],
    target: options.Target = "return",
    record: options.Record = None,
    observation: options.Observation = None,
    action: options.Action = None,
    subsets: Annotated[int, typer.Option(help="Subsets of the records to train on.", min=3)] = 100,
    share: Annotated[float, typer.Option(help="Share of the records in a subset.")] = 0.5,
    orders: Annotated[int, typer.Option(help="Orders in which each subset is trained anew.", min=2)] = 4,
    draws: options.Draws = DRAWS,
    test_episodes: Annotated[
        int, typer.Option(help="Episodes to test each trained policy by; 0: test returns are not measured.", min=0)
    ] = 0,
    leaving_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Leave out the highest and the lowest of each score too, more and more."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of subsets, orders and tests.", min=0)] = 0,
    env: options.ReplayEnv = None,
    memory: options.Memory = 2.0,
    json: options.AsJson = False,
) -> None:
    """Train a recorded round again without records, and tell how well each score predicts what comes of it.

    LDS is Spearman's correlation, over random subsets, of the sum of the kept records' scores with the result of
    training on them. With --leave-out, the round is also trained without the records that a score ranks highest,
    without those that it ranks lowest, and without as many at random. Written to counterfactual/ in the run as well.

    Example: whence counterfactual runs/lander --round 20 --test-episodes 200
    """
    directory = open_agent_run(run)
    check_links(directory.path)
    if test_episodes == 1:
        raise WhenceError("--test-episodes is 1; at least 2 are needed, or 0 to measure no test returns.")
    model, recording = experiments.load_recording(directory, round, env=env)
    explained = make_target(target, model, recording.records, record, observation, action)
    torch.set_num_threads(1)
    limit = int(memory * 2**30)
    # A small share of few records is no record.
    shares = [share for share in SHARES if share * len(recording.trained) >= 1]
    with ExitStack() as stack:
        status = stack.enter_context(errors.status("reading"))
        if leaving_out:  # checked here, since the study before it takes long
            check_removals(model.policy, recording, MOST - 1, shares=shares, memory=limit)
        evaluate = None
        if test_episodes:
            tests = measure_returns(directory, model, episodes=test_episodes, seed=seed, env=env)
            evaluate = stack.enter_context(tests)
        results = study(
            model.policy,
            recording,
            target=explained,
            share=share,
            count=subsets,
            orders=orders,
            draws=draws,
            evaluate=evaluate,
            seed=seed,
            memory=limit,
            on_stage=status.update,
        )
        settings = {"round": round, "target": repr(explained), "share": share, "subsets": subsets, "orders": orders}
        settings |= {"draws": draws, "test_episodes": test_episodes, "seed": seed, "stopped": recording.stopped}
        content = settings | {"rows": results.table.to_dicts()}
        file = directory.path / "counterfactual" / f"round_{round:05d}.json"
        _write_json(file, content)
        removals = None
        if leaving_out:
            # The curves leave out records at random already.
            scores = {name: values for name, values in results.scores.items() if name != "random"}
            removals = leave_out(
                model.policy,
                recording,
                scores,
                target=explained,
                shares=shares,
                orders=orders,
                evaluate=evaluate,
                seed=seed,
                memory=limit,
                on_stage=status.update,
            )
            content["removals"] = removals.to_dicts()
            _write_json(file, content)
    if json:
        print_json(content)
        return
    for (truth, outcome), rows in results.table.group_by("truth", "outcome", maintain_order=True):
        title = f"Round {round}, {subsets} subsets of {share:.0%}, {truth} minibatches, outcome: {outcome}"
        console.print(make_table(title, ("score", "LDS", "95% interval", "ceiling"), _format_rows(rows)))
    if removals is not None:
        for (truth, outcome), rows in removals.group_by("truth", "outcome", maintain_order=True):
            title = f"Round {round}, change of the {outcome}, {truth} minibatches, by records removed"
            console.print(_make_curves(title, rows))
    if recording.stopped:
        print_line("target_kl ended the round early: recorded trainings end there too, reshuffled ones go on.")
    print_line(f"Numbers: {file}")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    with write_atomically(file) as temporary:
        temporary.write_text(json_module.dumps(content, indent=1) + "\n", encoding="utf-8")


def _format_rows(rows: pl.DataFrame) -> list[tuple[str, ...]]:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    return [
        (row["score"], text(row["lds"]), f"[{text(row['low'])}, {text(row['high'])}]", text(row["ceiling"]))
        for row in rows.to_dicts()
    ]


def _make_curves(title: str, removals: pl.DataFrame) -> Table:
    cells: dict[tuple[str, str], list[str]] = {}
    for row in removals.to_dicts():
        cells.setdefault((row["score"] or "–", row["side"]), []).append(f"{row['change']:+.2g}")
    # The error of removals at random, which the others are compared with; their own errors are in the file.
    at_random = removals.filter(pl.col("side") == "random")["spread"].to_list()
    cells["", "± error"] = ["–" if spread is None else f"{spread:.2g}" for spread in at_random]
    counts = removals["removed"].unique().sort()
    return make_table(
        title, ("score", "side", *map(str, counts)), [(*curve, *changes) for curve, changes in cells.items()]
    )
