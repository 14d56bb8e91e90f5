"""`whence counterfactual`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import polars as pl
import torch
import typer
from rich.table import Table

from whence import experiments
from whence.cli.terminal import (
    console,
    errors,
    make_table,
    make_target,
    open_agent_run,
    options,
    print_json,
    print_line,
)
from whence.core import write_json
from whence.counterfactual import SHARES, leave_out, study
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
    test_episodes: Annotated[
        int, typer.Option(help="Episodes to test each trained policy by; 0: test returns are not measured.", min=0)
    ] = 0,
    leaving_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Leave out the highest and the lowest of each score too, more and more."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of subsets, orders and tests.", min=0)] = 0,
    env: options.ReplayEnv = None,
    trust: options.Trust = False,
    memory: options.Memory = 2.0,
    json: options.AsJson = False,
) -> None:
    """Train a recorded round again without records, and tell how well each score predicts what comes of it.

    LDS is Spearman's correlation, over random subsets, of the sum of the kept records' scores with the result of
    training on them. With --leave-out, the round is also trained without the records that a score ranks highest,
    without those that it ranks lowest, and without as many at random. Written to counterfactual/ in the run as well.

    Example: whence counterfactual runs/lander --round 20 --test-episodes 200
    """
    directory = open_agent_run(run, trust=trust)
    check_links(directory.path)
    model, recording = experiments.load_recording(directory, round, env=env)
    explained = make_target(target, model, recording.records, record, observation, action)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        status = stack.enter_context(errors.status("reading"))
        evaluate = None
        if test_episodes:
            tests = experiments.measure_returns(directory, model, round, episodes=test_episodes, seed=seed, env=env)
            evaluate = stack.enter_context(tests)
        results = study(
            model.policy,
            recording,
            target=explained,
            share=share,
            count=subsets,
            orders=orders,
            evaluate=evaluate,
            seed=seed,
            memory=int(memory * 2**30),
            on_stage=status.update,
        )
        settings = {"round": round, "target": repr(explained), "share": share, "subsets": subsets, "orders": orders}
        settings |= {"test_episodes": test_episodes, "seed": seed, "stopped": recording.stopped}
        content = settings | {"rows": results.table.to_dicts()}
        file = directory.path / "counterfactual" / f"round_{round:05d}.json"
        write_json(file, content)
        removals = None
        if leaving_out:
            removals = leave_out(
                model.policy,
                recording,
                {name: scores for name, scores in results.scores.items() if name != "random"},
                target=explained,
                shares=[share for share in SHARES if share * len(recording.trained) >= 1],
                orders=orders,
                evaluate=evaluate,
                seed=seed,
                memory=int(memory * 2**30),
                on_stage=status.update,
            )
            write_json(file, content := {**content, "removals": removals.to_dicts()})
    if json:
        print_json(content)
        return
    for (truth, outcome), rows in results.table.group_by("truth", "outcome", maintain_order=True):
        title = f"Round {round}, {subsets} subsets of {share:.0%}, {truth} minibatches, outcome: {outcome}"
        console.print(make_table(title, ("score", "LDS", "95% interval", "ceiling"), _format_rows(rows)))
        if removals is not None:
            title = f"Round {round}, change of the {outcome}, {truth} minibatches, by records removed"
            console.print(_make_curves(title, removals.filter(truth=truth, outcome=outcome)))
    print_line(f"Numbers: {file}")


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
