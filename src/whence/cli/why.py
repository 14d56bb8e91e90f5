"""`whence why`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.cause_tables import describe_causes, print_causes, print_steps
from whence.cli.console import errors, print_json, print_line
from whence.cli.options import AsJson, ReplayEnv
from whence.cli.progress import RoundBar
from whence.errors import WhenceError, suggest
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from whence.page.cause_view import CauseView, Decision
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
    question = _Question(episode_seed, step, deterministic, play, record, observation, action, env)
    _check_options(question, by, out)
    from whence.cli.runs import open_agent_run

    directory = open_agent_run(run)
    directory.require_rounds()
    if play:
        _play(directory, question, out, json=json)
        return
    with errors.status("Reading the decision …"):
        target, decision = _read_decision(directory, question, with_frame=out is not None)
    view = _find(directory, target, decision, by=by, top=top, env=env, with_frames=out is not None)
    if out is not None:
        from whence.page.pictures.cause_picture import draw_causes

        draw_causes(view, out)
    if json:
        print_json(describe_causes(view, by) | ({} if out is None else {"picture": str(out)}))
        return
    if question.is_chosen:
        print_line(
            "Of the episode's steps, this is the one whose action's probability rose most since the first round."
        )
    print_causes(view)
    print_line("As a picture: the same command with --out why.png" if out is None else f"Picture: {out}")


@dataclass(frozen=True)
class _Question:
    """What the options ask about; see `why`."""

    episode_seed: int | None
    step: int | None
    deterministic: bool
    play: bool
    record: int | None
    observation: str | None
    action: str | None
    env: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `play_episode`."""
        return {"seed": self.episode_seed or 0, "deterministic": self.deterministic, "env": self.env}

    @property
    def is_chosen(self) -> bool:
        """Whether the step is chosen by the rule."""
        return self.record is None and self.observation is None and self.step is None

    def list_ways(self) -> list[str]:
        """Return the options that name a decision, one for each way to name one."""
        is_given = {
            "--episode-seed": self.episode_seed is not None,
            "--step": self.step is not None,
            "--deterministic": self.deterministic,
            "--play": self.play,
        }
        played = [name for name in is_given if is_given[name]][:1]
        stored = ["--record"] if self.record is not None else []
        written = ["--observation"] if self.observation is not None or self.action is not None else []
        return [*played, *stored, *written]


def _check_options(question: _Question, by: str, out: Path | None) -> None:
    if len(ways := question.list_ways()) > 1:
        raise WhenceError(f"{ways[0]} and {ways[1]} name two decisions; give one of them.")
    if (question.observation is None) != (question.action is None):
        raise WhenceError("A decision needs both --observation and --action, as JSON.")
    if question.play and question.step is not None:
        raise WhenceError("--play lists the steps to choose from; leave it out to ask about --step.")
    from whence.page.cause_view import BY

    if by not in BY:
        raise WhenceError(f"--by is {by!r}.{suggest(by, BY)}")
    if out is not None and out.suffix.lower() != ".png":
        raise WhenceError(f"--out is {out}; its name has to end in .png.")


def _read_decision(run: RunDirectory, question: _Question, *, with_frame: bool) -> tuple["Action", "Decision"]:
    if question.record is not None:
        return _read_record(run, question.record, question.env, with_frame=with_frame)
    if question.observation is not None:
        return _parse_decision(run, question)
    return _read_step(run, question, with_frame=with_frame)


def _read_step(run: RunDirectory, question: _Question, *, with_frame: bool) -> tuple["Action", "Decision"]:
    from whence.diagnosis.decisions import play_episode
    from whence.page.cause_view import Decision

    episode = play_episode(run, **question.settings)
    step = episode.choose_step() if question.step is None else question.step
    target = episode.target(step)
    frames = play_episode(run, **question.settings, frames=[step], longest=step + 1).frames if with_frame else {}
    return target, Decision(
        action=_name_action(run, question.env, target),
        place=f"at step {step} of an episode with seed {episode.seed}",
        before=float(episode.first_log_probs[step]),
        after=float(episode.records.log_probs[step]),
        is_discrete=episode.is_discrete,
        frame=frames.get(step),
    )


def _read_record(run: RunDirectory, record: int, env: str | None, *, with_frame: bool) -> tuple["Action", "Decision"]:
    import polars as pl

    from whence.cli.show import find_round
    from whence.diagnosis.causes import RankedMoment
    from whence.diagnosis.decisions import read_record
    from whence.moments import find_moment
    from whence.page.cause_view import place_record, replay_faces

    number = find_round(run, None, record, None)
    target = read_record(run, number, record, env=env)
    table = run.round("records", number).filter(pl.col("record_id") == record)
    face = RankedMoment(number, find_moment(table, record))
    frames = replay_faces(run, [face], env=env)[0] if with_frame else {}
    return target, _compare(run, target, place_record(number, table.row(0, named=True)), env, frames.get(record))


def _parse_decision(run: RunDirectory, question: _Question) -> tuple["Action", "Decision"]:
    from whence.cli.options import parse_action
    from whence.experiments.rl.plan import check_action
    from whence.experiments.rl.stored import load_model
    from whence.targets import Action

    target = Action(**parse_action(question.observation, question.action))
    model = load_model(run, run.rounds()[0], env=question.env)
    check_action(target, model.observation_space, model.action_space)
    return target, _compare(run, target, "in this observation", question.env, None)


def _compare(run: RunDirectory, target: "Action", place: str, env: str | None, frame: Any) -> "Decision":
    from whence.diagnosis.decisions import compare_log_probs
    from whence.page.cause_view import Decision

    before, after, is_discrete = compare_log_probs(run, target, env=env)
    return Decision(_name_action(run, env, target), place, before, after, is_discrete, frame)


def _name_action(run: RunDirectory, env: str | None, target: "Action") -> str:
    import numpy as np

    from whence.moments import name_action

    action = np.asarray(target.action).squeeze().tolist()
    labels = _read_labels(run, env)
    return f"action {action}" if labels is None and isinstance(action, int) else name_action(action, labels)


def _read_labels(run: RunDirectory, env: str | None) -> list[str] | None:
    from whence.experiments.rl.labels import action_labels
    from whence.page.moment_view import find_env

    return action_labels(find_env(run, env))


def _find(
    run: RunDirectory,
    target: "Action",
    decision: "Decision",
    *,
    by: str,
    top: int,
    env: str | None,
    with_frames: bool,
) -> "CauseView":
    """Score all rounds below a progress bar, and gather what taught the decision."""
    from dataclasses import replace

    from whence.diagnosis import find_causes
    from whence.page.cause_view import BY, gather_causes, replay_faces
    from whence.page.moment_view import find_env
    from whence.page.pictures.cause_picture import SHOWN

    pair = {"target_states": target.observation, "actions": target.action, "action_masks": target.action_mask}
    with RoundBar("rounds", "scoring") as bar:
        causes = find_causes(run, **pair, method=BY[by], env=env, on_round=bar.update)
    labels = _read_labels(run, env)
    name = find_env(run, env)
    view = gather_causes(run, causes, decision, env_name=name, method=BY[by], action_labels=labels, most=top)
    if not with_frames:
        return view
    with errors.status("Drawing the moments …"):
        frames, note = replay_faces(run, [*view.raised[:SHOWN], *view.lowered[:SHOWN]], env=env)
    return replace(view, frames=frames, frames_note=note)


def _play(run: RunDirectory, question: _Question, out: Path | None, *, json: bool) -> None:
    """List the steps of an episode, and draw them."""
    from whence.cli.cause_tables import list_steps
    from whence.diagnosis.decisions import play_episode

    episode = play_episode(run, **question.settings)
    chosen = episode.choose_step()
    rows = list_steps(episode, _read_labels(run, question.env))
    if out is not None:
        from whence.page.pictures.cause_picture import draw_sheet

        steps = spread_steps(len(episode), DRAWN, chosen)
        frames = play_episode(run, **question.settings, frames=steps, longest=max(steps) + 1).frames
        captions = {step: f"step {step}: {rows[step]['action']}" for step in steps}
        draw_sheet(frames, captions, chosen, f"An episode with seed {episode.seed}", out)
    if json:
        content = {"run": str(run.path), "seed": episode.seed, "chosen": chosen, "steps": rows}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    print_steps(episode, rows, spread_steps(len(episode), LISTED, chosen), chosen)
    sampled = " --deterministic" if question.deterministic else ""
    print_line(f"Ask about one: whence why {run.path} --episode-seed {episode.seed}{sampled} --step {chosen}")
    if out is not None:
        print_line(f"Picture: {out}")


def spread_steps(count: int, most: int, chosen: int) -> list[int]:
    """Return at most so many steps, evenly over an episode of `count` steps, with the chosen one among them."""
    if count <= most:
        return list(range(count))
    steps = {round(place * (count - 1) / (most - 2)) for place in range(most - 1)}
    return sorted(steps | {chosen})
