"""`whence counterfactual`."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import polars as pl
import torch
import typer

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
from whence.counterfactual import study
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
    seed: Annotated[int, typer.Option(help="Of subsets, orders and tests.", min=0)] = 0,
    env: options.ReplayEnv = None,
    trust: options.Trust = False,
    memory: options.Memory = 2.0,
    json: options.AsJson = False,
) -> None:
    """Train a recorded round again without records, and tell how well each score predicts what comes of it.

    LDS is Spearman's correlation, over random subsets, of the sum of the kept records' scores with the result of
    training on them. Written to counterfactual/ in the run as well.

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
    if json:
        print_json(content)
        return
    for (truth, outcome), rows in results.table.group_by("truth", "outcome", maintain_order=True):
        title = f"Round {round}, {subsets} subsets of {share:.0%}, {truth} minibatches, outcome: {outcome}"
        console.print(make_table(title, ("score", "LDS", "95% interval", "ceiling"), _format_rows(rows)))
    print_line(f"Numbers: {file}")


def _format_rows(rows: pl.DataFrame) -> list[tuple[str, ...]]:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    return [
        (row["score"], text(row["lds"]), f"[{text(row['low'])}, {text(row['high'])}]", text(row["ceiling"]))
        for row in rows.to_dicts()
    ]
