"""`whence llm prove`."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from whence.causes import prove_response
from whence.cli.terminal import AsJson, Trust, check_ways, errors, parse_rounds, print_proof, resumable
from whence.core import WhenceError
from whence.runs import RunDirectory


def prove(
    run: Annotated[Path, typer.Argument(help="A run directory of a language model, or of scored rollouts.")],
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Leave out the rollouts that were flagged on the run's page.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="The behaviour: after this prompt", metavar="TEXT", show_default=False)
    ] = None,
    response: Annotated[str | None, typer.Option(help="this response.", metavar="TEXT", show_default=False)] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="Measure the share of fresh answers that hold this text.", metavar="TEXT", show_default=False
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="The finder that names the rollouts that taught it; see whence llm why --help.")
    ] = "nearest",
    top: Annotated[int, typer.Option(help="How many rollouts it names.", min=1)] = 64,
    rounds: Annotated[
        str | None, typer.Option(help="The rounds to train: 1-20. (default: all)", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds; each is four trainings.", min=1)] = 5,
    answers: Annotated[
        int, typer.Option(help="Fresh answers to stored prompts, for --match and the mean reward; 0: none.", min=0)
    ] = 256,
    reward: Annotated[
        str | None,
        typer.Option(help="The reward of these answers. (default: the run's, if known)", metavar="FILE.PY:FUNCTION"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The checkpoint before the first round. (default: the run's, if known)", show_default=False),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the trainings. (default: the run's)", show_default=False)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over a round. (default: the run's)", min=1, show_default=False)
    ] = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Prove what taught the model an answer: train again without those rollouts, and see whether it is gone.

    From a copy of the policy before the first round, it trains all rounds again on the stored rollouts, of whatever
    trainer: with all, without those in question, without as many random ones of the same rounds, and without those that
    the same finder names for another rollout, drawn at random (of flagged ones: those with the nearest advantages). It
    measures the probability of the response, and by fresh answers the share that holds a text and the reward.

    The rollouts are those that a finder names for a response, or those that are flagged. Without a response, it
    measures the probability of the left-out ones. Interrupted, the same command goes on.

    Example: whence llm prove runs/chains --prompt '8-1?' --response '8-1=8;8' --by bm25

    Example: whence llm prove runs/completions --flagged --match 'As an expert' --learning-rate 1e-6
    """
    if (prompt is None) != (response is None):
        raise WhenceError("--prompt and --response go together: they are the behaviour.")
    directory = RunDirectory.open(run, trust=trust)
    if not directory.is_language:
        raise WhenceError(f"{run} is no language model's run. Of an agent's: whence prove {run}.")
    check_ways({"--flagged": flagged}, "--prompt and --response", has_behaviour=prompt is not None)
    torch.set_num_threads(1)
    with resumable(), errors.status("loading") as status:
        proof = prove_response(
            directory,
            prompt,
            response,
            directory.flags() if flagged else None,
            match=match,
            method=by,
            top=top,
            rounds=parse_rounds("--rounds", rounds) or None,
            seeds=seeds,
            answers=answers,
            model=model,
            reward=reward,
            learning_rate=learning_rate,
            epochs=epochs,
            on_stage=status.update,
        )
    print_proof(proof, json=json)
