"""`whence prove` and `whence again`, which train once more."""

import json as json_library
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import torch
import typer

from whence import causes
from whence.cli import terminal
from whence.cli.commands.why_command import choose_decision
from whence.cli.terminal import options
from whence.core import WhenceError
from whence.page import ExploredRun
from whence.runs import RunDirectory
from whence.stored.agents import require_training, score_round, state_names

_TITLES = {"all": "with all", "without": "without these", "random": "without random", "placebo": "without a placebo's"}

_TESTS = terminal.make_field_options(causes.AgentTraining, names=["test_episodes"], panel=options.AGENTS)
_LANGUAGE = terminal.make_field_options(
    causes.LanguageTraining,
    names=["match", "answers", "model", "learning_rate", "epochs"],
    panel=options.LANGUAGE,
)


@terminal.with_options([*_TESTS, *_LANGUAGE])
def prove(
    run: Annotated[Path, typer.Argument(help="The directory of a run, or of rollouts scored by whence llm score.")],
    flagged: Annotated[bool, typer.Option("--flagged", help="Leave out what was flagged on the run's page.")] = False,
    why_flagged: Annotated[
        bool, typer.Option("--why-flagged", help="The behaviour: what was flagged; leave out what taught it.")
    ] = False,
    by: Annotated[str, typer.Option(help="The finder of what taught it; see whence why --help.")] = "nearest",
    top: Annotated[int, typer.Option(help="How many records it names.", min=1)] = 64,
    rounds: Annotated[str | None, options.optional(help="A stretch of rounds to train: 1-20. (default: all)")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds; each is four trainings.", min=1)] = 5,
    trust: options.Trust = False,
    json: options.AsJson = False,
    where: Annotated[
        str | None,
        options.agents_option(
            help=f"Leave out the records of each round for which this condition holds: {causes.EXAMPLE}.", metavar="SQL"
        ),
    ] = None,
    record: Annotated[int | None, options.agents_option(help="The decision: what was done in this record.")] = None,
    episode_seed: options.EpisodeSeed = None,
    step: options.Step = None,
    observation: options.InState = None,
    action: options.TakenAction = None,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
    prompt: options.Prompt = None,
    response: options.Response = None,
    reward: Annotated[
        list[str] | None,
        options.language_option(
            help="A reward of fresh answers; repeat it for more. (default: the run's, if known)",
            metavar="FILE.PY:FUNCTION",
        ),
    ] = None,
    **fields: Any,
) -> None:
    """Prove what taught a policy a behaviour: train again without those records, and see whether it is gone.

    From the policy before the first round, it trains all rounds again on the stored rollouts, four times a seed: on all
    records, without those in question, without as many random ones of the same rounds, and without a placebo's. These
    the same finder names for what another record did; of records that you name, they are others of near advantages.

    After each training it measures the log-probability of the behaviour; of an agent the test return, and of a language
    model by fresh answers the mean of each reward and the share that holds a text (--match). It says which of these
    fall or rise by more than without the others. It says nothing if training on all records does not give the run.

    Name a behaviour, and a finder (--by) names the records: --why-flagged, as whence why --flagged; of an agent
    --record, --episode-seed and --step, or --observation and --action; of a language model --prompt and --response. Or
    name the records: --flagged, of an agent --where. Without a behaviour, it measures the log-probability of what these
    records did. Interrupted, the same command continues.

    Example: whence prove runs/lander --where "action = 1 and advantage < 0" --rounds 30

    Example: whence prove runs/chains --prompt '8-1?' --response '8-1=8;8' --by bm25
    """
    directory = RunDirectory.open(run, trust=trust)
    agents = {"--record": record, "--episode-seed": episode_seed, "--step": step}
    written = {"--observation": observation, "--action": action}
    tests, language = terminal.parse_fields(_TESTS, fields), terminal.parse_fields(_LANGUAGE, fields)
    language |= {"reward": reward} if reward else {}
    causes.check_kind(
        directory,
        agents={**agents, **written, "--where": where, "--env": env, **_name_options(tests)},
        language={
            "--prompt": prompt or None,
            "--response": response or None,
            "--by bm25": by == "bm25",
            **_name_options(language),
        },
    )
    if len(prompt or []) != len(response or []):
        raise WhenceError("--prompt and --response go together, as often as one likes: they are the behaviour.")
    has_decision = any(option is not None for option in (*agents.values(), *written.values()))
    if why_flagged and (has_decision or prompt):
        raise WhenceError("--why-flagged and other options both name the behaviour; give one of them.")
    if flagged and where is not None:
        raise WhenceError("--flagged and --where both name the records to leave out; give one of them.")
    require_training(directory)
    numbers = terminal.parse_rounds("--rounds", rounds) or directory.require_rounds()
    torch.set_num_threads(1)
    with terminal.resumable(), terminal.errors.status("reading") as status:
        left_out = directory.flags() if flagged else None
        if where is not None:
            left_out = pl.concat([_find_group(directory, number, where, env) for number in numbers])
            if left_out.is_empty():
                raise WhenceError(f"--where is {where!r}, which holds for no record of these rounds.")
        behaviour: Any = None
        words = None
        if why_flagged:
            behaviour = directory.flags()
            words = f"one of {len(behaviour)} flagged {'responses' if directory.is_language else 'records'}"
        elif has_decision:
            explored = ExploredRun(directory, env=env)
            behaviour, decision = choose_decision(explored, episode_seed, step, record, observation, action)
            words = decision.what
        elif prompt and response:
            behaviour = causes.Examples(prompt, response)
        proof = causes.prove(
            directory,
            behaviour,
            left_out,
            words=words,
            method=by,
            top=top,
            rounds=numbers,
            seeds=seeds,
            training=causes.LanguageTraining(**language) if directory.is_language else causes.AgentTraining(**tests),
            env=env,
            on_stage=status.update,
        )
    _print_proof(proof, run, json=json)


def _name_options(fields: dict[str, Any]) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": value for name, value in fields.items()}


def _find_group(run: RunDirectory, number: int, where: str, env: str | None) -> pl.DataFrame:
    """Return the records for which a condition holds, over columns, scores and axes of observations."""
    records = run.round("records", number).drop("score", "error", "score_folds", "fold", strict=False)
    scores = score_round(run, number, env=env).to_polars()
    records = records.join(scores, on="record_id", how="left", maintain_order="left")
    holds = causes.select_where(records, where, state_names(run.config.get("env"), run.config))
    return records.filter(holds).select(pl.lit(number, dtype=pl.Int64).alias("round"), "record_id")


def _print_proof(proof: causes.Proof, run: Path, *, json: bool) -> None:
    """Print what came of the trainings: a table, and what it means in a sentence."""
    rows = proof.summarise()
    if json:
        about = {"run": str(run), "text": proof.text, "left_out": proof.size, "verdicts": proof.verdicts}
        terminal.print_json(about | {"stored": dict(proof.stored), "outcomes": rows, "notes": list(proof.notes)})
        return
    cells = [[name, "the run itself", causes.format_outcome(name, value), "–"] for name, value in proof.stored.items()]
    cells += [
        [row["outcome"], _TITLES[row["variant"]], *map(_format_interval, [row] * 2, ("value", "change"))]
        for row in rows
    ]
    cells.sort(key=lambda cell: list(proof.verdicts).index(cell[0]))
    title = f"{proof.size:,} {proof.records} left out, {proof.table['seed'].n_unique()} seeds, 95% intervals"
    terminal.console.print(terminal.make_table(title, ["outcome", "trained", "mean", "change"], cells))
    terminal.print_line(proof.text)
    for note in proof.notes:
        terminal.print_line(f"Note: {note}")
    terminal.print_line(f"Numbers: {proof.file}")


def _format_interval(row: dict[str, Any], column: str) -> str:
    interval, outcome = row[column], row["outcome"]
    if column == "change" and row["variant"] == "all":
        return "–"
    sign = "+" if column == "change" else ""
    mean = causes.format_outcome(outcome, interval["mean"], sign)
    ends = [causes.format_outcome(outcome, interval[end], sign) for end in ("low", "high") if interval[end] is not None]
    return mean + (f" [{', '.join(ends)}]" if ends else "")


def again(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    start: Annotated[
        int | None,
        options.optional("--from", help="The round to continue after. (default: a checkpoint before the return fell)"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Other seeds; each is a training of every variant.", min=1)] = 8,
    rounds: Annotated[
        int | None, options.optional(help="Rounds of a training. (default: to the run's end)", min=1)
    ] = None,
    changes: Annotated[
        list[str] | None,
        options.optional(
            "--set", help="A setting to change, such as learning_rate=1e-4; each alone.", metavar="NAME=VALUE"
        ),
    ] = None,
    without: Annotated[
        str | None,
        options.optional(help=f"Leave out the records for which this holds: {causes.EXAMPLE}.", metavar="SQL"),
    ] = None,
    trust: options.Trust = False,
    json: options.AsJson = False,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
) -> None:
    """See whether a return that fell falls again: continue the training from before it with other seeds.

    It counts in how many seeds the return falls as it did in the run, unchanged and with one thing changed at a time.
    If nearly all break, a setting is the cause, and a change that prevents it is a cure. If few do, it was chance.

    Settings are SB3's, such as learning_rate, clip_range, max_grad_norm, n_epochs, target_kl or ent_coef. Records that
    are left out are compared with as many others, drawn at random in each round. Interrupted, the same command
    continues.

    Example: whence again runs/lander --set learning_rate=1e-4 --set max_grad_norm=0.1

    Example: whence again runs/lander --from 30 --rounds 12 --without "abs(reward) > 100"
    """
    directory = RunDirectory.open(run, trust=trust)
    torch.set_num_threads(1)
    with terminal.resumable(), terminal.errors.status("reading") as status:
        repetition = causes.repeat(
            directory,
            start,
            seeds=seeds,
            rounds=rounds,
            changes=[*map(_read_change, changes or [])],
            without=without,
            env=env,
            on_stage=status.update,
        )
    _print_repetition(repetition, run, json=json)


def _read_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name.strip(), json_library.loads(value)
    except ValueError:
        pass
    raise WhenceError(f"--set is {text!r}; a name and a number are needed, such as learning_rate=1e-4.")


def _print_repetition(repetition: causes.Repetition, run: Path, *, json: bool) -> None:
    rows = repetition.summarise()
    if json:
        about = {"run": str(run), "text": repetition.text, "start": repetition.start, "rounds": repetition.rounds}
        terminal.print_json(about | {"variants": rows, "notes": list(repetition.notes)})
        return
    cells = [
        [
            row["variant"],
            f"{row['broke']} of {row['of']}",
            "–" if row["low"] is None else f"{row['low']:.0%} to {row['high']:.0%}",
            "–" if row["change_low"] is None else f"{row['change_low']:+.0%} to {row['change_high']:+.0%}",
            "–" if row["return"]["mean"] is None else f"{row['return']['mean']:.4g}",
        ]
        for row in rows
    ]
    title = f"After round {repetition.start}, {repetition.rounds} rounds, 95% intervals"
    heads = ["trained", "broke", "share", "change", "last return"]
    terminal.console.print(
        terminal.make_table(title, heads, [[cell.replace("-", "−") for cell in row] for row in cells])
    )
    terminal.print_line(repetition.text)
    for note in repetition.notes:
        terminal.print_line(f"Note: {note}")
    terminal.print_line(f"Numbers: {repetition.file}")
