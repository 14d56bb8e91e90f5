"""`whence prove`."""

from pathlib import Path
from typing import Annotated

import polars as pl
import torch
import typer

from whence import stored
from whence.causes import prove_decision
from whence.cli.commands.why_command import choose_decision
from whence.cli.terminal import (
    AsJson,
    ReplayEnv,
    Trust,
    check_ways,
    errors,
    open_agent_run,
    parse_rounds,
    print_proof,
    resumable,
)
from whence.core import Return, WhenceError, first_line
from whence.page import ExploredRun
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.scores import attribute, read_axes
from whence.stored.agents import state_names

_EXAMPLE = '"action = 2 and advantage < 0"'


def prove(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent.")],
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Leave out the records that were flagged on the run's page.")
    ] = False,
    where: Annotated[
        str | None,
        typer.Option(
            help=f"Leave out the records of each round for which this condition holds: {_EXAMPLE}.",
            metavar="SQL",
            show_default=False,
        ),
    ] = None,
    episode_seed: Annotated[
        int | None, typer.Option(help="The decision: of an episode played with this seed,", min=0, show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="at this step.", min=0, show_default=False)] = None,
    record: Annotated[
        int | None, typer.Option(help="The decision: what was done in this record.", show_default=False)
    ] = None,
    observation: Annotated[
        str | None, typer.Option(help="The decision: in this observation,", metavar="JSON", show_default=False)
    ] = None,
    action: Annotated[str | None, typer.Option(help="this action.", metavar="JSON", show_default=False)] = None,
    by: Annotated[
        str, typer.Option(help="The finder that names the records that taught the decision; see whence why --help.")
    ] = "nearest",
    top: Annotated[int, typer.Option(help="How many records it names.", min=1)] = 64,
    rounds: Annotated[
        str | None, typer.Option(help="A stretch of rounds to train: 1-20. (default: all)", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds; each is four trainings.", min=1)] = 5,
    test_episodes: Annotated[
        int, typer.Option(help="Episodes to test each trained policy by; 0: its test return is not measured.", min=0)
    ] = 50,
    env: ReplayEnv = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Prove what taught the policy a decision: train again without those records, and see whether it is gone.

    From the policy before the first round, it trains all rounds again on the stored rollouts: with all records, without
    those in question, without as many random ones of the same rounds, and without those that the same finder names for
    a decision of another record, drawn at random (of records that you name: those with the nearest advantages). Then it
    measures the probability of the decision, and the test return.

    The records are those that a finder names for a decision, or those that are flagged, or a condition's. Without a
    decision, it measures the probability of what the left-out records did. Interrupted, the same command goes on.

    Example: whence prove runs/lander --record 60437 --top 200

    Example: whence prove runs/lander --where "action = 1 and advantage < 0" --rounds 30
    """
    explored = ExploredRun(open_agent_run(run, trust=trust), env=env)
    directory, options = explored.directory, (episode_seed, step, record, observation, action)
    has_decision = any(option is not None for option in options)
    numbers = parse_rounds("--rounds", rounds) or directory.require_rounds()
    check_ways({"--flagged": flagged, "--where": where is not None}, "--record 60437", has_behaviour=has_decision)
    left_out = None
    torch.set_num_threads(1)
    with resumable(), errors.status("reading") as status:
        if flagged:
            left_out = directory.flags()
        elif where is not None:
            left_out = pl.concat([_find_group(directory, number, where, env) for number in numbers])
            if left_out.is_empty():
                raise WhenceError(f"--where is {where!r}, which holds for no record of these rounds.")
        target, words = None, "what these records did"
        if has_decision:
            target, decision = choose_decision(explored, *options)
            words = decision.what
        proof = prove_decision(
            directory,
            target,
            left_out,
            behaviour=words,
            method=by,
            top=top,
            rounds=numbers,
            seeds=seeds,
            test_episodes=test_episodes,
            env=env,
            on_stage=status.update,
        )
    print_proof(proof, json=json)


def _find_group(run: RunDirectory, number: int, where: str, env: str | None) -> pl.DataFrame:
    """Return the records for which a condition holds, over columns, scores and axes of observations."""
    records = run.round("records", number).drop("score", "error", "score_folds", "fold", strict=False)
    model, batch = stored.load_round(run, number, env=env)
    scores = attribute(model.policy, batch, target=Return(), objective=model_objective(model))
    records = records.join(scores.to_polars(), on="record_id", how="left", maintain_order="left")
    axes = read_axes(records, state_names(run.config.get("env"), run.config))
    plain = records.drop(name for name in records.columns if name.split(".")[0] in ("observation", "raw_observation"))
    table = plain.with_columns(pl.Series(name, values) for name, values in axes.items())
    try:
        group = table.filter(pl.sql_expr(where))
    except pl.exceptions.PolarsError as refusal:
        raise WhenceError(
            f"--where is {where!r}: {first_line(refusal)}. Write a condition in SQL, such as {_EXAMPLE}, over "
            f"{', '.join(table.columns)}; names with spaces in double quotes."
        ) from None
    return group.select(pl.lit(number, dtype=pl.Int64).alias("round"), "record_id")
