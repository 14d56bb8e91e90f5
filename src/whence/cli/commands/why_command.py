"""`whence why`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import polars as pl
import typer

from whence import causes, page
from whence.cli import terminal
from whence.cli.terminal import options
from whence.core import Action, WhenceError
from whence.page import pictures
from whence.runs import RunDirectory
from whence.scores import find_moments
from whence.stored import agents, language


def why(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    record: Annotated[
        int | None,
        options.optional(
            help="What was done in this record; of a language model, why this response scored as it did. (default: the "
            "most harmful of the round)",
        ),
    ] = None,
    by: Annotated[
        Literal["nearest", "influence", "bm25"],
        typer.Option(
            help="nearest: advantage × cosine of the gradients of log π, best with ten examples or more; influence: "
            "product of gradients; bm25, of language models: advantage × similarity of words, which needs no policy."
        ),
    ] = "nearest",
    top: Annotated[
        int, typer.Option(help="Moments, records, or tokens and rows of the target, to list at either end.", min=1)
    ] = 10,
    flagged: Annotated[
        bool, typer.Option("--flagged", help="What was flagged on the run's page: decisions, or responses.")
    ] = False,
    trust: options.Trust = False,
    json: options.AsJson = False,
    episode_seed: options.EpisodeSeed = None,
    step: options.Step = None,
    observation: options.InState = None,
    action: options.TakenAction = None,
    out: Annotated[Path | None, options.agents_option(help="Draw a picture: .png.")] = None,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
    prompt: options.Prompt = None,
    response: options.Response = None,
    round: Annotated[int | None, options.language_option(help="The round of the response. (default: the last)")] = None,
) -> None:
    """Tell what taught the present policy what it does: the records of all rounds that speak for it.

    Every record of every round is scored at the policy that collected it. Above 0 it speaks for the behaviour: by
    nearest, something went better than expected and pushed the policy the same way, or worse and the other way.

    Of an agent it asks about a decision, or flagged ones. Without options, it plays an episode and asks about the step
    whose action's probability rose most since the first round.

    Of a language model it asks about responses to prompts: --prompt and --response, or --flagged. Else it shows which
    tokens of a stored response its score comes from, and at which rows of the target it pulls: the parts of the tokens
    sum to the score, and so do those of the rows, demonstrations or the round's responses. Both read the policies of
    rounds, which are there for round 1, and for rounds whose checkpoints were kept:
    --settings '{"save_every": 1, "keep_checkpoints": 40}'.

    Example: whence why runs/lander --episode-seed 3 --step 57 --out why.png

    Example: whence why runs/chains --prompt '8-1?' --response '8-1=8;8'
    """
    prompts, responses = prompt or [], response or []
    if len(prompts) != len(responses) or [bool(prompts), flagged, (round, record) != (None, None)].count(True) > 1:
        raise WhenceError(
            "--prompt and --response go together, as often as one likes, without --flagged, --round and --record: they "
            "ask what taught an answer, over all rounds; so does --flagged. --round and --record name one stored "
            "response."
        )
    if out is not None:
        pictures.check_picture_name(out, ".png")
    directory = RunDirectory.open(run, trust=trust)
    directory.require_rounds()
    written = {"--observation": observation, "--action": action}
    causes.check_kind(
        directory,
        agents={"--episode-seed": episode_seed, "--step": step, **written, "--out": out, "--env": env},
        language={"--prompt": prompt or None, "--round": round, "--by bm25": by == "bm25"},
    )
    if directory.is_language and not (prompts or flagged):
        _explain_score(directory, round, record, top, json)
        return
    if directory.is_language:
        view = _gather_response_causes(directory, prompts, responses, flagged, by, top)
        content = {"prompts": prompts, "responses": responses, "flagged": flagged} | page.describe_causes(view)
    else:
        explored = page.ExploredRun(directory, env=env)
        target: Action | pl.DataFrame
        with terminal.errors.status("Reading the decision …"):
            naming = episode_seed, step, record, observation, action
            if not flagged:
                target, decision = choose_decision(explored, *naming, with_frame=out is not None)
            elif naming == (None,) * len(naming):
                target, decision = directory.flags(), _describe_flagged(explored)
            else:
                raise WhenceError("--flagged and other options both name decisions; give one of them.")
        with terminal.RoundBar("rounds", "scoring") as bar:
            framed = 0 if out is None else pictures.ACROSS
            view = page.gather_causes(explored, target, decision, by=by, most=top, framed=framed, on_round=bar.update)
        content = page.describe_causes(view)
        if out is not None:
            pictures.draw_causes(view, out)
            content["picture"] = str(out)
        if not (json or flagged) and (step, record, observation, action) == (None, None, None, None):
            terminal.print_line(
                "Of the episode's steps, this is the one whose action's probability rose most since the first round."
            )
    if json:
        terminal.print_json(content)
        return
    terminal.print_causes(view)
    if out is not None:
        terminal.print_line(f"Picture: {out}")


def choose_decision(
    explored: page.ExploredRun,
    episode_seed: int | None,
    step: int | None,
    record: int | None,
    observation: str | None,
    action: str | None,
    *,
    with_frame: bool = False,
) -> tuple[Action, page.Decision]:
    """Return the decision that options name; without any, that of an episode whose probability rose most."""
    played = "--episode-seed" if episode_seed is not None else "--step" if step is not None else None
    recorded = None if record is None else "--record"
    written = None if observation is None and action is None else "--observation"
    ways = [way for way in (played, recorded, written) if way]
    if len(ways) > 1:
        raise WhenceError(f"{ways[0]} and {ways[1]} name two decisions; give one of them.")
    if record is not None:
        number = terminal.find_round(explored.directory, None, record)
        return page.read_decision(explored, number, record, with_frame=with_frame)
    if written:
        model = agents.load_agent(explored.directory, explored.directory.rounds()[0], env=explored.env)
        target = terminal.parse_decision(observation, action, model)
        return target, page.describe_target(explored, target, "in this observation")
    return _play_step(explored, episode_seed or 0, step, with_frame=with_frame)


def _describe_flagged(run: page.ExploredRun) -> page.Decision:
    """Return what was done in the flagged records in words, with its mean log-probability."""
    flags = run.directory.flags()
    actions = causes.read_actions(run.directory, flags, env=run.env)
    what = f"What was done in one of {len(flags)} flagged records, which are not listed, by the geometric mean"
    return page.Decision(what, *causes.compare_log_probs(run.directory, actions, env=run.env))


def _play_step(run: page.ExploredRun, seed: int, step: int | None, *, with_frame: bool) -> tuple[Action, page.Decision]:
    episode = causes.play_episode(run.directory, seed=seed, env=run.env)
    step = episode.choose_step() if step is None else step
    target = episode.target(step)
    log_probs = float(episode.first_log_probs[step]), float(episode.records.log_probs[step]), episode.is_discrete
    decision = page.describe_target(run, target, f"at step {step} of an episode with seed {seed}", log_probs)
    if not with_frame:
        return target, decision
    frames = causes.play_episode(run.directory, seed=seed, env=run.env, frames=[step], longest=step + 1).frames
    return target, replace(decision, frame=frames.get(step))


def _gather_response_causes(
    run: RunDirectory, prompts: Sequence[str], responses: Sequence[str], flagged: bool, by: str, top: int
) -> page.CauseView:
    """Score the records of all rounds below a progress bar, and return what taught the responses.

    Their present log-probability is that under the trained model, or under the policy of the last scored round.
    """
    behaviour, notes = run.flags() if flagged else causes.Examples(prompts, responses), list[str]()
    what = f"One of {len(responses)} responses, by the geometric mean"
    if len(responses) == 1:
        what = f"“{terminal.shorten(responses[0])}” after “{terminal.shorten(prompts[0])}”"
    elif flagged:
        what = f"One of the {len(run.flags())} flagged responses, by the geometric mean"
        notes.append("The flagged responses are asked about, so they are not listed.")
    with terminal.RoundBar("rounds", "scoring") as bar:
        table = causes.find_causes(run, behaviour, method=by, on_round=bar.update)
    log_probs = table["log_prob"].drop_nulls().to_list() or [None]
    first, now = log_probs[0], log_probs[-1]
    if by != "bm25":
        policies, trained = language.list_policies(run), causes.measure_trained(run, behaviour)
        if policies.missing:
            notes.append(
                f"The policies of {len(policies.missing)} of {len(run.rounds())} rounds were not kept, so their "
                f"records are not scored. To keep all, train with {policies.remedy}. Without policies: "
                "--by bm25."
            )
        if trained is None:
            last = table["round"][-1]
            notes.append(
                f"The run holds no trained model yet; “now” is the policy that drew the records of round {last}."
            )
        else:
            now = trained
    raised, lowered = (
        causes.rank_records(table, lowest=lowest, most=top).drop("log_prob").rename({"record_id": "record"}).to_dicts()
        for lowest in (False, True)
    )
    decision = page.Decision(what, first, now)
    return page.CauseView(str(run.path), "", decision, by, causes.sum_rounds(table), raised, lowered, notes=notes)


def _explain_score(run: RunDirectory, round: int | None, record: int | None, top: int, json: bool) -> None:
    """Show which tokens of a stored response its score comes from, and at which rows of the target it pulls."""
    number = terminal.find_round(run, round, record)
    if record is None:
        moments = find_moments(run.round("records", number), lowest=True, most=1)
        if not moments:
            raise WhenceError(f"No response of round {number} of {run.path} scores below 0. Name one: --record.")
        record = moments[0].record_id
    with terminal.errors.status("Taking the score apart …"):
        explanation = language.explain_response(run, number, record)
    if json:
        terminal.print_json({"run": str(run.path), "round": number, **terminal.describe_explanation(explanation, top)})
    else:
        terminal.print_explanation(explanation, number, top)
