"""`whence why`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from whence.causes import play_episode
from whence.cli.terminal import (
    AsJson,
    ReplayEnv,
    RoundBar,
    Trust,
    errors,
    find_round,
    open_agent_run,
    parse_decision,
    print_causes,
    print_json,
    print_line,
)
from whence.core import Action, WhenceError
from whence.page import (
    Decision,
    ExploredRun,
    describe_causes,
    describe_target,
    gather_causes,
    pictures,
    read_decision,
)
from whence.stored.agents import load_agent


def why(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent, finished or not.")],
    episode_seed: Annotated[
        int | None,
        typer.Option(help="Play an episode with this seed. (default: 0)", min=0, show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="The step of that episode to ask about. (default: the one whose action's probability rose most)",
            min=0,
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        int | None, typer.Option(help="Ask about what was done in this record of a round.", show_default=False)
    ] = None,
    observation: Annotated[
        str | None, typer.Option(help="Ask about an observation,", metavar="JSON", show_default=False)
    ] = None,
    action: Annotated[str | None, typer.Option(help="and an action.", metavar="JSON", show_default=False)] = None,
    by: Annotated[
        Literal["nearest", "influence"],
        typer.Option(help="nearest: advantage × cosine of the gradients of log π; influence: product of gradients."),
    ] = "nearest",
    top: Annotated[int, typer.Option(help="Moments to list at either end.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="Draw a picture: .png.", show_default=False)] = None,
    env: ReplayEnv = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Tell what taught the present policy a decision: the moments of all rounds that speak for it.

    Without options, it plays an episode and asks about the step whose action's probability rose most since the first
    round. Every record of every round is scored at the policy that collected it. Above 0 it speaks for the decision:
    by nearest, something went better than expected and pushed the policy the same way, or worse and the other way.

    Example: whence why runs/lander --episode-seed 3 --step 57 --out why.png
    """
    if out is not None:
        pictures.check_picture_name(out, ".png")
    explored = ExploredRun(open_agent_run(run, trust=trust), env=env)
    explored.directory.require_rounds()
    with errors.status("Reading the decision …"):
        target, decision = choose_decision(
            explored, episode_seed, step, record, observation, action, with_frame=out is not None
        )
    with RoundBar("rounds", "scoring") as bar:
        framed = 0 if out is None else pictures.ACROSS
        view = gather_causes(explored, target, decision, by=by, most=top, framed=framed, on_round=bar.update)
    if out is not None:
        pictures.draw_causes(view, out)
    if json:
        print_json(describe_causes(view) | ({} if out is None else {"picture": str(out)}))
        return
    if step is None and (record, observation, action) == (None, None, None):
        print_line(
            "Of the episode's steps, this is the one whose action's probability rose most since the first round."
        )
    print_causes(view)
    if out is not None:
        print_line(f"Picture: {out}")


def choose_decision(
    explored: ExploredRun,
    episode_seed: int | None,
    step: int | None,
    record: int | None,
    observation: str | None,
    action: str | None,
    *,
    with_frame: bool = False,
) -> tuple[Action, Decision]:
    """Return the decision that options name; without any, that of an episode whose probability rose most."""
    played = "--episode-seed" if episode_seed is not None else "--step" if step is not None else None
    recorded = None if record is None else "--record"
    written = None if observation is None and action is None else "--observation"
    ways = [way for way in (played, recorded, written) if way]
    if len(ways) > 1:
        raise WhenceError(f"{ways[0]} and {ways[1]} name two decisions; give one of them.")
    if record is not None:
        number = find_round(explored.directory, None, record)
        return read_decision(explored, number, record, with_frame=with_frame)
    if written:
        model = load_agent(explored.directory, explored.directory.rounds()[0], env=explored.env)
        target = parse_decision(observation, action, model)
        return target, describe_target(explored, target, "in this observation")
    return _play_step(explored, episode_seed or 0, step, with_frame=with_frame)


def _play_step(run: ExploredRun, seed: int, step: int | None, *, with_frame: bool) -> tuple[Action, Decision]:
    episode = play_episode(run.directory, seed=seed, env=run.env)
    step = episode.choose_step() if step is None else step
    target = episode.target(step)
    log_probs = float(episode.first_log_probs[step]), float(episode.records.log_probs[step]), episode.is_discrete
    decision = describe_target(run, target, f"at step {step} of an episode with seed {seed}", log_probs)
    if not with_frame:
        return target, decision
    frames = play_episode(run.directory, seed=seed, env=run.env, frames=[step], longest=step + 1).frames
    return target, replace(decision, frame=frames.get(step))
