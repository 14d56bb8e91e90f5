"""`whence why`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli.console import console, errors, make_table, print_json, print_line
from whence.cli.moment_tables import describe_moment, make_printable
from whence.cli.options import AsJson, ReplayEnv
from whence.cli.progress import RoundBar
from whence.errors import WhenceError, suggest
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from whence.diagnosis.causes import RankedMoment
    from whence.diagnosis.decisions import PlayedEpisode
    from whence.report.cause_view import CauseView, Decision
    from whence.targets import Action

BY: Mapping[str, str] = {"influence": "raw", "similar": "similar"}
"""The method of `whence.diagnosis.find_causes` by the option's value."""

LISTED = 40
"""Steps of an episode that are listed at most."""

DRAWN = 24
"""Steps of an episode that a sheet of frames shows."""

BLOCKS = " ▁▂▃▄▅▆▇█"


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
            help="influence; or similar: advantage × same action × similarity of state, which needs no gradient."
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
    question = _Question(episode_seed, step, deterministic, play, record, observation, action)
    _check_options(question, by, out)
    from whence.cli.runs import open_agent_run

    directory = open_agent_run(run)
    if not directory.rounds():
        raise WhenceError(f"{run} holds no rounds yet.")
    if play:
        _play(directory, question, out, env, json=json)
        return
    with errors.status("Reading the decision …"):
        target, decision = _read_decision(directory, question, env, with_frame=out is not None)
    view = _find(directory, target, decision, by=by, top=top, env=env, with_frames=out is not None)
    if out is not None:
        from whence.report.cause_stills import draw_causes

        draw_causes(view, out)
    if json:
        print_json(_describe(view, by, out))
        return
    _print(view)
    if out is None:
        print_line("As a picture: the same command with --out why.png")
    else:
        print_line(f"Picture: {out}")


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

    @property
    def seed(self) -> int:
        """The played episode's seed."""
        return self.episode_seed or 0


def _check_options(question: _Question, by: str, out: Path | None) -> None:
    played = [
        name
        for name, is_given in (
            ("--episode-seed", question.episode_seed is not None),
            ("--step", question.step is not None),
            ("--deterministic", question.deterministic),
            ("--play", question.play),
        )
        if is_given
    ]
    ways = [
        *played[:1],
        *(["--record"] if question.record is not None else []),
        *(["--observation"] if question.observation is not None or question.action is not None else []),
    ]
    if len(ways) > 1:
        raise WhenceError(f"{ways[0]} and {ways[1]} name two decisions; give one of them.")
    if (question.observation is None) != (question.action is None):
        raise WhenceError("A decision needs both --observation and --action, as JSON.")
    if question.play and question.step is not None:
        raise WhenceError("--play lists the steps to choose from; leave it out to ask about --step.")
    if by not in BY:
        raise WhenceError(f"--by is {by!r}.{suggest(by, BY)}")
    if out is not None and out.suffix.lower() != ".png":
        raise WhenceError(f"--out is {out}; its name has to end in .png.")


def _read_decision(
    run: RunDirectory, question: _Question, env: str | None, *, with_frame: bool
) -> tuple["Action", "Decision"]:
    if question.record is not None:
        return _read_record(run, question.record, env, with_frame=with_frame)
    if question.observation is not None:
        return _parse_decision(run, question, env)
    return _read_step(run, question, env, with_frame=with_frame)


def _read_step(
    run: RunDirectory, question: _Question, env: str | None, *, with_frame: bool
) -> tuple["Action", "Decision"]:
    from whence.diagnosis.decisions import play_episode
    from whence.report.cause_view import Decision

    settings: dict[str, Any] = {"seed": question.seed, "deterministic": question.deterministic, "env": env}
    episode = play_episode(run, **settings)
    step = episode.choose_step() if question.step is None else question.step
    target = episode.target(step)
    frame = play_episode(run, **settings, frames=[step], longest=step + 1).frames.get(step) if with_frame else None
    chosen = ", where its probability rose most," if question.step is None else ""
    return target, Decision(
        action=_name_action(run, env, target),
        place=f"step {step}{chosen} of an episode with seed {question.seed}",
        before=float(episode.first_log_probs[step]),
        after=float(episode.records.log_probs[step]),
        is_discrete=episode.is_discrete,
        frame=frame,
    )


def _read_record(run: RunDirectory, record: int, env: str | None, *, with_frame: bool) -> tuple["Action", "Decision"]:
    import polars as pl

    from whence.cli.show import find_round
    from whence.diagnosis.causes import RankedMoment
    from whence.diagnosis.decisions import read_record
    from whence.moments import find_moment
    from whence.report.cause_view import replay_faces

    number = find_round(run, None, record, None)
    target = read_record(run, number, record, env=env)
    table = run.round("records", number).filter(pl.col("record_id") == record)
    moment = find_moment(table, record)
    frames = replay_faces(run, [RankedMoment(number, moment)], env=env)[0] if with_frame else {}
    where = "" if moment.step is None else f", step {moment.step} of episode {moment.episode_id},"
    return target, _compare(run, target, f"record {record}{where} in round {number}", env, frames.get(record))


def _parse_decision(run: RunDirectory, question: _Question, env: str | None) -> tuple["Action", "Decision"]:
    from whence.cli.options import parse_action
    from whence.experiments.rl.plan import check_action
    from whence.experiments.rl.stored import load_model
    from whence.targets import Action

    target = Action(**parse_action(question.observation, question.action))
    model = load_model(run, run.policies()[-1], env=env)
    check_action(target, model.observation_space, model.action_space)
    return target, _compare(run, target, "the observation", env, None)


def _compare(run: RunDirectory, target: "Action", place: str, env: str | None, frame: Any) -> "Decision":
    from whence.diagnosis.decisions import compare_log_probs
    from whence.report.cause_view import Decision

    before, after, is_discrete = compare_log_probs(run, target, env=env)
    return Decision(_name_action(run, env, target), place, before, after, is_discrete, frame)


def _name_action(run: RunDirectory, env: str | None, target: "Action") -> str:
    import numpy as np

    from whence.moments import name_action

    action = np.asarray(target.action).squeeze().tolist()
    labels = _read_labels(run, env)
    return name_action(action, labels) if labels is not None or not isinstance(action, int) else f"action {action}"


def _read_labels(run: RunDirectory, env: str | None) -> list[str] | None:
    from whence.experiments.rl.labels import action_labels
    from whence.report.moment_view import find_env

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
    from whence.report.cause_stills import SHOWN
    from whence.report.cause_view import gather_causes, replay_faces
    from whence.report.moment_view import find_env

    with RoundBar("rounds", "scoring") as bar:
        causes = find_causes(
            run,
            target.observation,
            target.action,
            action_masks=target.action_mask,
            method=BY[by],
            env=env,
            on_round=bar.update,
        )
    labels = _read_labels(run, env)
    view = gather_causes(
        run, causes, decision, env_name=find_env(run, env), method=BY[by], action_labels=labels, most=top
    )
    if not with_frames:
        return view
    with errors.status("Drawing the moments …"):
        frames, note = replay_faces(run, [*view.raised[:SHOWN], *view.lowered[:SHOWN]], env=env)
    return replace(view, frames=frames, frames_note=note)


def _play(run: RunDirectory, question: _Question, out: Path | None, env: str | None, *, json: bool) -> None:
    """List the steps of an episode, and draw them."""
    from whence.diagnosis.decisions import play_episode

    settings: dict[str, Any] = {"seed": question.seed, "deterministic": question.deterministic, "env": env}
    episode = play_episode(run, **settings)
    chosen = episode.choose_step()
    rows = _list_steps(episode, _read_labels(run, env))
    if out is not None:
        from whence.report.cause_stills import draw_sheet

        drawn = _spread(len(episode), DRAWN, chosen)
        frames = play_episode(run, **settings, frames=drawn, longest=max(drawn) + 1).frames
        captions = {step: f"step {step}: {rows[step]['action']}" for step in drawn}
        draw_sheet(frames, captions, chosen, f"An episode with seed {question.seed}", out)
    if json:
        content = {"run": str(run.path), "seed": question.seed, "chosen": chosen, "steps": rows}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    shown = _spread(len(episode), LISTED, chosen)
    print_line(
        f"An episode with seed {question.seed}: {len(episode)} steps, return {episode.rewards.sum():.4g}"
        + (f"; {len(shown)} of them are listed." if len(shown) < len(episode) else ".")
    )
    cells = [
        [
            *("▶" if step == chosen else "", step, make_printable(rows[step]["action"])),
            *(f"{rows[step][name]:.3f}" for name in ("first", "now")),
            f"{rows[step]['reward']:.3g}",
        ]
        for step in shown
    ]
    what = "probability" if episode.is_discrete else "log-density"
    console.print(make_table(f"The action's {what}", ["", "step", "action", "first policy", "now", "reward"], cells))
    print_line(f"Ask about one: whence why {run.path} --episode-seed {question.seed} --step {chosen}")
    if out is not None:
        print_line(f"Picture: {out}")


def _list_steps(episode: "PlayedEpisode", labels: Sequence[str] | None) -> list[dict[str, Any]]:
    from whence.moments import name_action

    first, now = episode.first_log_probs, episode.records.log_probs
    if episode.is_discrete:
        first, now = first.exp(), now.exp()
    columns = zip(episode.records.actions.tolist(), first.tolist(), now.tolist(), episode.rewards.tolist(), strict=True)
    return [
        {"step": step, "action": name_action(action, labels), "first": before, "now": after, "reward": reward}
        for step, (action, before, after, reward) in enumerate(columns)
    ]


def _spread(count: int, most: int, chosen: int) -> list[int]:
    """Return at most so many steps, evenly over the episode, with the chosen one among them."""
    if count <= most:
        return list(range(count))
    steps = {round(place * (count - 1) / (most - 2)) for place in range(most - 1)}
    return sorted(steps | {chosen})


def _print(view: "CauseView") -> None:
    from whence.report.cause_view import tell_causes, tell_decision

    print_line(make_printable(tell_decision(view.decision)))
    print_line(make_printable(tell_causes(view)))
    print_line("")
    for line in draw_strip(view.rounds["raised"].to_list(), view.rounds["lowered"].to_list()):
        print_line(line)
    numbers = view.rounds["round"].to_list()
    print_line(
        f"          rounds {numbers[0]} to {numbers[-1]}; sums {view.rounds['raised'].sum():.3g} and "
        f"{view.rounds['lowered'].sum():.3g}"
    )
    for entries, verb in ((view.raised, "raised"), (view.lowered, "lowered")):
        if entries:
            console.print(_make_moment_table(entries, verb, view.action_labels))


def draw_strip(raised: Sequence[float], lowered: Sequence[float], width: int = 100) -> list[str]:
    """Return two lines of blocks, a column for each round or for neighbouring rounds: what raised, and what lowered.

    Args:
        raised: of each round, at least 0.
        lowered: of each round, at most 0.
        width: the most columns.
    """
    columns = min(width, len(raised))
    edges = [round(place * len(raised) / columns) for place in range(columns + 1)]
    sums = [
        [abs(sum(values[first:last])) / (last - first) for first, last in zip(edges, edges[1:], strict=False)]
        for values in (raised, lowered)
    ]
    largest = max(max(sums[0]), max(sums[1])) or 1.0
    return [
        f"{name:<9} " + "".join(BLOCKS[-(-value * 8 // largest).__int__()] for value in values)
        for name, values in zip(("raised", "lowered"), sums, strict=True)
    ]


def _make_moment_table(entries: Sequence["RankedMoment"], verb: str, labels: Sequence[str] | None) -> Any:
    from whence.moments import name_action

    rows = []
    for entry in entries:
        moment = entry.moment
        steps = f"{moment.first_step}–{moment.last_step}" if moment.records > 1 else moment.step
        advantage = "–" if moment.advantage is None else f"{moment.advantage:+.3g}"
        action = make_printable(name_action(moment.action, labels))
        rows.append(
            [
                entry.round,
                moment.record_id,
                moment.episode_id,
                moment.step,
                steps,
                action,
                advantage,
                f"{moment.score:+.3g}",
            ]
        )
    headings = ["round", "record", "episode", "step", "steps", "action", "advantage", "score"]
    return make_table(f"The {len(rows)} moments that {verb} it most", headings, rows)


def _describe(view: "CauseView", by: str, out: Path | None) -> dict[str, Any]:
    from whence.report.cause_view import describe_decision, tell_causes, tell_decision

    return {
        "run": view.run,
        "decision": describe_decision(view.decision),
        "by": by,
        "method": view.method,
        "text": f"{tell_decision(view.decision)} {tell_causes(view)}",
        "rounds": view.rounds.to_dicts(),
        **{
            name: [{"round": entry.round, **describe_moment(entry.moment, view.action_labels)} for entry in entries]
            for name, entries in (("raised", view.raised), ("lowered", view.lowered))
        },
        **({} if out is None else {"picture": str(out)}),
    }
