"""`whence why`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.cause_tables import print_causes
from whence.cli.console import console, errors, make_table, print_json, print_line
from whence.cli.options import AsJson, ReplayEnv, parse_action
from whence.cli.progress import RoundBar
from whence.errors import WhenceError, suggest
from whence.moments import name_action
from whence.page.explorer.embedding import spread

if TYPE_CHECKING:
    from whence.diagnosis import PlayedEpisode
    from whence.page.cause_view import Decision
    from whence.page.explored_run import ExploredRun
    from whence.targets import Action

LISTED, DRAWN = 40, 24
"""Steps of an episode that are listed, and drawn, at most."""


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
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Play the most probable actions, in place of samples.")
    ] = False,
    play: Annotated[
        bool, typer.Option("--play", help="Only list the steps of that episode; with --out, draw them too.")
    ] = False,
    record: Annotated[
        int | None, typer.Option(help="Ask about what was done in this record of a round.", show_default=False)
    ] = None,
    observation: Annotated[
        str | None, typer.Option(help="Ask about an observation,", metavar="JSON", show_default=False)
    ] = None,
    action: Annotated[str | None, typer.Option(help="and an action.", metavar="JSON", show_default=False)] = None,
    by: Annotated[
        str,
        typer.Option(
            help="influence; or a simple rule, advantage × same action × similarity of states: similar compares "
            "observations, similar-hidden the policy's last hidden layer."
        ),
    ] = "influence",
    top: Annotated[int, typer.Option(help="Moments to list at either end.", min=1)] = 10,
    out: Annotated[Path | None, typer.Option(help="Draw a picture: .png.", show_default=False)] = None,
    env: ReplayEnv = None,
    json: AsJson = False,
) -> None:
    """Tell what taught the present policy a decision: the moments of all rounds that raised its probability.

    Without options, it plays an episode and asks about the step whose action's probability rose most since the first
    round. Every record of every round is scored at the policy that collected it: above 0, training on it raised the
    probability of the action there.

    Example: whence why runs/lander --episode-seed 3 --step 57 --out why.png
    """
    played = {"--episode-seed": episode_seed is not None, "--step": step is not None}
    played |= {"--deterministic": deterministic, "--play": play}
    written = observation is not None or action is not None
    ways = [name for name, is_given in played.items() if is_given][:1]
    ways += [name for name, is_given in (("--record", record is not None), ("--observation", written)) if is_given]
    _check_options(ways, step, play, observation, action, by, out)
    from dataclasses import replace

    from whence.cli.runs import open_agent_run
    from whence.page.cause_view import gather_causes, replay_faces
    from whence.page.explored_run import ExploredRun
    from whence.page.explorer.detail import describe_causes
    from whence.page.pictures.cause_picture import SHOWN, draw_causes

    explored = ExploredRun(open_agent_run(run), env=env)
    explored.directory.require_rounds()
    settings = {"seed": episode_seed or 0, "deterministic": deterministic, "env": env}
    if play:
        _play(explored, settings, out, json=json)
        return
    with errors.status("Reading the decision …"):
        if record is not None:
            target, decision = _read_record(explored, record, with_frame=out is not None)
        elif written:
            target, decision = _parse_decision(explored, observation, action)
        else:
            target, decision = _read_step(explored, settings, step, with_frame=out is not None)
    with RoundBar("rounds", "scoring") as bar:
        view = gather_causes(explored, target, decision, by=by, most=top, on_round=bar.update)
    if out is not None:
        with errors.status("Drawing the moments …"):
            frames, note = replay_faces(explored, [*view.raised[:SHOWN], *view.lowered[:SHOWN]])
        draw_causes(replace(view, frames=frames, frames_note=note), out)
    if json:
        content = {"run": str(run), **describe_causes(view, {})}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    if record is None and not written and step is None:
        print_line(
            "Of the episode's steps, this is the one whose action's probability rose most since the first round."
        )
    print_causes(view)
    print_line("As a picture: the same command with --out why.png" if out is None else f"Picture: {out}")


def _check_options(
    ways: list[str],
    step: int | None,
    play: bool,
    observation: str | None,
    action: str | None,
    by: str,
    out: Path | None,
) -> None:
    """Refuse options that name no decision, or two; `ways`: an option for each way in which one is named."""
    if len(ways) > 1:
        raise WhenceError(f"{ways[0]} and {ways[1]} name two decisions; give one of them.")
    if (observation is None) != (action is None):
        raise WhenceError("A decision needs both --observation and --action, as JSON.")
    if play and step is not None:
        raise WhenceError("--play lists the steps to choose from; leave it out to ask about --step.")
    from whence.page.cause_view import BY
    from whence.page.pictures.canvas import check_picture_name

    if by not in BY:
        raise WhenceError(f"--by is {by!r}.{suggest(by, BY)}")
    if out is not None:
        check_picture_name(out, ".png")


def _read_step(
    run: "ExploredRun", settings: dict[str, Any], step: int | None, *, with_frame: bool
) -> tuple["Action", "Decision"]:
    from dataclasses import replace

    from whence.diagnosis import play_episode
    from whence.page.cause_view import describe_target

    episode = play_episode(run.directory, **settings)
    step = episode.choose_step() if step is None else step
    target = episode.target(step)
    log_probs = float(episode.first_log_probs[step]), float(episode.records.log_probs[step]), episode.is_discrete
    place = f"at step {step} of an episode with seed {episode.seed}"
    decision = describe_target(run, target, place, log_probs)
    if not with_frame:
        return target, decision
    frames = play_episode(run.directory, **settings, frames=[step], longest=step + 1).frames
    return target, replace(decision, frame=frames.get(step))


def _read_record(run: "ExploredRun", record: int, *, with_frame: bool) -> tuple["Action", "Decision"]:
    from dataclasses import replace

    from whence.cli.commands.show_command import find_round
    from whence.diagnosis import RankedMoment
    from whence.moments import find_moment
    from whence.page.cause_view import read_decision, replay_faces

    number = find_round(run.directory, None, record, None)
    target, decision = read_decision(run, number, record)
    if not with_frame:
        return target, decision
    face = RankedMoment(number, find_moment(run.round(number).table, record))
    return target, replace(decision, frame=replay_faces(run, [face])[0].get(record))


def _parse_decision(run: "ExploredRun", observation: str | None, action: str | None) -> tuple["Action", "Decision"]:
    from whence.experiments import check_action, load_model
    from whence.page.cause_view import describe_target
    from whence.targets import Action

    target = Action(**parse_action(observation, action))
    model = load_model(run.directory, run.directory.rounds()[0], env=run.env)
    check_action(target, model.observation_space, model.action_space)
    return target, describe_target(run, target, "in this observation")


def _play(run: "ExploredRun", settings: dict[str, Any], out: Path | None, *, json: bool) -> None:
    """List the steps of an episode, and draw them."""
    from whence.diagnosis import play_episode

    episode = play_episode(run.directory, **settings)
    chosen = episode.choose_step()
    rows = _list_steps(episode, run.labels)
    if out is not None:
        from whence.page.pictures.cause_picture import draw_sheet

        steps = spread_steps(len(episode), DRAWN, chosen)
        frames = play_episode(run.directory, **settings, frames=steps, longest=max(steps) + 1).frames
        captions = {step: f"step {step}: {rows[step]['action']}" for step in steps}
        draw_sheet(frames, captions, chosen, f"An episode with seed {episode.seed}", out)
    path = run.directory.path
    if json:
        content = {"run": str(path), "seed": episode.seed, "chosen": chosen, "steps": rows}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    _print_steps(episode, rows, chosen)
    sampled = " --deterministic" if settings["deterministic"] else ""
    print_line(f"Ask about one: whence why {path} --episode-seed {episode.seed}{sampled} --step {chosen}")
    if out is not None:
        print_line(f"Picture: {out}")


def _list_steps(episode: "PlayedEpisode", labels: list[str] | None) -> list[dict[str, Any]]:
    """Return the steps of an episode in JSON types, with the action's probability then and now, or its log-density."""
    first, now = episode.first_log_probs, episode.records.log_probs
    if episode.is_discrete:
        first, now = first.exp(), now.exp()
    columns = zip(episode.records.actions.tolist(), first.tolist(), now.tolist(), episode.rewards.tolist(), strict=True)
    return [
        {"step": step, "action": name_action(action, labels), "first": before, "now": after, "reward": reward}
        for step, (action, before, after, reward) in enumerate(columns)
    ]


def _print_steps(episode: "PlayedEpisode", rows: list[dict[str, Any]], chosen: int) -> None:
    """Print steps of an episode, with the one chosen by the rule marked."""
    shown = spread_steps(len(episode), LISTED, chosen)
    part = f"; {len(shown)} of them are listed." if len(shown) < len(episode) else "."
    total = f"return {episode.rewards.sum():.4g}"
    print_line(f"An episode with seed {episode.seed}: {len(episode)} steps, {total}{part}")
    cells = [
        [
            *("▶" if row["step"] == chosen else "", row["step"], row["action"]),
            *(f"{row['first']:.3f}", f"{row['now']:.3f}", f"{row['reward']:.3g}"),
        ]
        for row in (rows[step] for step in shown)
    ]
    what = "probability" if episode.is_discrete else "log-density"
    console.print(make_table(f"The action's {what}", ["", "step", "action", "first policy", "now", "reward"], cells))
    print_line("▶: it rose most since the first round.")


def spread_steps(count: int, most: int, chosen: int) -> list[int]:
    """Return at most so many steps, evenly over an episode of `count` steps, with the chosen one among them."""
    return sorted({*spread(range(count), most if count <= most else most - 1), chosen})
