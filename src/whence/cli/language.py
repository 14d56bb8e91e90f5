"""`whence llm train` and `whence llm compare`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.table import Table

from whence import experiments
from whence.cli.app import app
from whence.cli.output import (
    ComparisonBars,
    RunBar,
    console,
    errors,
    json_object,
    line,
    log_to_terminal,
    print_json,
    resumable,
    said_of,
    summary_table,
)
from whence.errors import WhenceError
from whence.experiments import LANGUAGE_ARMS, LANGUAGE_TARGETS, STANDARD, TASKS, LanguageConfig
from whence.experiments.language import SOURCE
from whence.report import write_report, write_run_report
from whence.report.page import READING
from whence.runs import RunDirectory

llm = typer.Typer(
    help="Post-train a language model with PPO on the responses that help.", no_args_is_help=True, add_completion=False
)
app.add_typer(llm, name="llm")

_NONE = "none"  # what people call training on everything; results call it by the standard arm's name

_SELECTIONS = tuple(_NONE if arm == STANDARD else arm for arm in LANGUAGE_ARMS)

_SOURCE = "A model and data of your own"

Task: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"A laboratory that makes its own small model and problems: {', '.join(TASKS)}.", show_default=False
    ),
]
Size: TypeAlias = Annotated[str, typer.Option(help="Of the laboratory: small, tiny for a look, large for a GPU.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="Of the model's parameters: float32 or bfloat16.")]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Directory or id of a causal language model of Transformers.", rich_help_panel=_SOURCE, show_default=False
    ),
]
Dataset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Directory, file or id of a data set with the column prompt.", rich_help_panel=_SOURCE, show_default=False
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Function of (prompts, responses) that returns numbers, as file.py:name or module:name; further "
        "arguments get the data set's columns of their names.",
        rich_help_panel=_SOURCE,
        show_default=False,
    ),
]
RewardModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="In its place: directory or id of a sequence classifier, whose logit is the reward.",
        rich_help_panel=_SOURCE,
        show_default=False,
    ),
]
RewardLabel: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Which of its labels, where it has several.", rich_help_panel=_SOURCE, show_default=False),
]
Demonstrations: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Data set with the columns prompt and completion, for the target validation.",
        rich_help_panel=_SOURCE,
        show_default=False,
    ),
]
TestDataset: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Data set whose prompts the model is measured on.", rich_help_panel=_SOURCE, show_default=False),
]
TestReward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Function, as for --reward, that it is measured by. (default: the reward)",
        rich_help_panel=_SOURCE,
        show_default=False,
    ),
]
Lora: TypeAlias = Annotated[
    int, typer.Option(help="Rank of a LoRA adapter to train in place of the whole model; 0: the whole model.", min=0)
]
HeldOut: TypeAlias = Annotated[
    int, typer.Option(help="Prompts set aside, over whose responses the target is taken in every round.", min=0)
]
Algorithm: TypeAlias = Annotated[str, typer.Option(help="ppo, or TRL's grpo or rloo.")]
Settings: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help='Settings of whence.llm.PPOConfig, or TRL\'s GRPOConfig or RLOOConfig, as JSON: {"learning_rate": 1e-5}.',
        metavar="JSON",
        show_default=False,
    ),
]
Rounds: TypeAlias = Annotated[
    int | None, typer.Option(help="Rollouts to train on. (default: the task's, or 100)", show_default=False)
]


@llm.command()
def train(
    ctx: typer.Context,
    task: Task = None,
    size: Size = "small",
    selection: Annotated[str, typer.Option(help=f"Which responses train: {', '.join(_SELECTIONS)}.")] = "ippo",
    target: Annotated[
        str | None,
        typer.Option(
            help=f"What a response's score says it raises: {', '.join(LANGUAGE_TARGETS)}. (default: sequence for iif, "
            "validation for ippo)",
            show_default=False,
        ),
    ] = None,
    rounds: Rounds = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="The run's directory. (default: runs/TASK-SELECTION-seed0)", show_default=False)
    ] = None,
    model: Model = None,
    dataset: Dataset = None,
    reward: Reward = None,
    reward_model: RewardModel = None,
    reward_label: RewardLabel = None,
    demonstrations: Demonstrations = None,
    test_dataset: TestDataset = None,
    test_reward: TestReward = None,
    dtype: Dtype = "float32",
    lora: Lora = 0,
    held_out: HeldOut = 0,
    algorithm: Algorithm = "ppo",
    settings: Settings = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check configuration, prompts and rewards, tell memory and work, and load no weights."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Train a language model on the responses that help, with PPO, GRPO or RLOO.

    In every round responses are drawn and rewarded, scored, selected, and trained on. The run directory holds prompts,
    responses, rewards and scores of every round; report.html in it shows them, model/ is what was trained. With
    --settings '{"save_every": 5}' an interrupted run goes on from its last checkpoint.

    Example: whence llm train --task arithmetic --selection ippo
    """
    source = {name: ctx.params[name] for name in SOURCE}
    arm = _arm(selection, target)
    config = LanguageConfig(
        arm,
        seed,
        _task(task, source),
        **source,
        size=size,
        dtype=dtype,
        lora=lora,
        held_out=held_out,
        algorithm=algorithm,
        settings=_settings(settings, rounds),
    )
    path = run or Path("runs") / f"{config.env.rstrip('/').rpartition('/')[2]}-{arm}-seed{seed}"
    log_to_terminal()
    experiments.language.prepare(config)
    if dry_run:
        _rehearse(config, json)
        return
    was_finished = experiments.language.is_finished(config, path)
    _run(config, path)
    directory = RunDirectory.open(path)
    write_run_report(directory, path / "report.html")
    last = directory.table("metrics").to_dicts()[-1]
    evaluations = directory.table("evaluations")
    last |= {} if evaluations.is_empty() else evaluations.to_dicts()[-1]
    if json:
        print_json({"run": str(path), "config": config.to_json(), "last_round": last})
        return
    done = "was finished already" if was_finished else f"{config.rounds} rounds done"
    line(f"{config.env}, {arm}, seed {seed}: {done}. Last round: {', '.join(said_of(last)) or '–'}")
    line(f"Run:   {path}")
    line(f"Model: {path / 'model'}")
    line(f"Page:  {path / 'report.html'}")


def _rehearse(config: LanguageConfig, json: bool) -> None:
    """Tell what a run would take."""
    from whence.experiments.estimate import estimate

    found = estimate(config)
    if json:
        print_json({"config": config.to_json(), "estimate": found.to_json()})
        return
    line(
        f"{config.env}, {config.arm}, {config.algorithm.upper()}: {found.parameters:,} parameters, of which "
        f"{found.trained:,} train; {found.prompts:,} prompts of up to {found.prompt_tokens} tokens, responses of up to "
        f"{found.response_tokens}; {config.rounds} rounds."
    )
    table = Table("", "memory", "PFLOP a round", title="What a run takes")
    for what, held in found.stays.items():
        table.add_row(what, _amount(held), "")
    for stage, held in found.stages.items():
        work = f"{found.flops[stage] / 1e15:.3g}" if stage in found.flops else ""
        table.add_row(f"{stage.replace('_', '-')}, besides", _amount(held), work)
    table.add_row("at the most; in all", _amount(found.peak), f"{sum(found.flops.values()) / 1e15:.3g}")
    console.print(table)
    line("Bytes are of tensors; an allocator takes more. A reward's own model comes on top.")
    line("Work is of linear layers: 1 PFLOP takes about 10 s at 100 TFLOP/s. Drawing responses takes longer than that,")
    line("since each token reads all weights.")
    line("No weights were loaded, and nothing was trained: leave --dry-run out to begin.")


def _amount(held: int) -> str:
    return f"{held / 2**30:.2f} GiB" if held >= 2**30 else f"{held / 2**20:.1f} MiB"


def _run(config: LanguageConfig, path: Path) -> None:
    try:
        with RunBar(config.rounds) as bar:
            experiments.language.run(config, path, bar.update)
    except KeyboardInterrupt:
        done = f"Interrupted after {bar.rounds} of {config.rounds} rounds. They are in {path}:"
        errors.print(done, soft_wrap=True)
        errors.print(f"  whence report {path}", highlight=False, soft_wrap=True)
        kept = "goes on from the last checkpoint" if config.settings.get("save_every") else "starts the run over"
        errors.print(f"The same command {kept}.")
        raise typer.Exit(130) from None


@llm.command()
def compare(
    ctx: typer.Context,
    task: Task = None,
    size: Size = "small",
    arms: Annotated[
        str,
        typer.Option(help=f"Selections, separated by commas: {', '.join(_SELECTIONS)}; with a target: iif-token."),
    ] = "none,random,iif-sequence,iif-token,ippo,ippo-unweighted",
    seeds: Annotated[int, typer.Option(help="Runs per arm, with seeds 0, 1, ...", min=1)] = 3,
    rounds: Rounds = None,
    model: Model = None,
    dataset: Dataset = None,
    reward: Reward = None,
    reward_model: RewardModel = None,
    reward_label: RewardLabel = None,
    demonstrations: Demonstrations = None,
    test_dataset: TestDataset = None,
    test_reward: TestReward = None,
    dtype: Dtype = "float32",
    lora: Lora = 0,
    algorithm: Algorithm = "ppo",
    settings: Settings = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time. (default: one per core)", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for summary.json, report.html and the runs.")] = Path("out/llm"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Train each selection on each seed, and tell what it gains and costs beside training on every response.

    Interrupted, the same command goes on where it was.

    Example: whence llm compare --task arithmetic --arms none,iif-sequence,ippo --seeds 3
    """
    source = {name: ctx.params[name] for name in SOURCE}
    names = [_arm(name.strip(), None) for name in arms.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise WhenceError(f"arms is {arms!r}; name each arm once. Known: {', '.join(_SELECTIONS)}.")
    first = [
        LanguageConfig(
            name,
            0,
            _task(task, source),
            **source,
            size=size,
            dtype=dtype,
            lora=lora,
            algorithm=algorithm,
            settings=_settings(settings, rounds),
        )
        for name in names
    ]
    if first[0].task is None and test_dataset is None:
        raise WhenceError("Arms are compared by a test; give its prompts: --test-dataset.")
    configs = [replace(config, seed=seed) for seed in range(seeds) for config in first]
    experiments.language.prepare(configs[0])
    with resumable(), ComparisonBars(configs) as bars:
        comparison = experiments.compare(configs, out, workers=workers, progress=bars.update)
    write_report(comparison, out / "report.html")
    if json:
        print_json(comparison.summary)
        return
    ((name, summary),) = comparison.summary.items()
    console.print(summary_table(f"{name}, {seeds} seeds, {configs[0].rounds} rounds", summary))
    console.print(READING, style="dim")
    for what, file in (("Numbers", "summary.json"), ("Page", "report.html")):
        line(f"{what}: {out / file}")


def _arm(selection: str, target: str | None) -> str:
    selection = STANDARD if selection == _NONE else selection
    return selection if target is None else f"{selection}-{target}"


def _task(task: str | None, source: Mapping[str, Any]) -> str | None:
    """Return the task asked for; the first one where neither a task nor a model was."""
    return task or (None if any(source.values()) else next(iter(TASKS)))


def _settings(text: str | None, rounds: int | None) -> dict[str, Any]:
    given = json_object("--settings", text, """'{"learning_rate": 1e-5}'""") or {}
    if rounds is not None and "rounds" in given:
        raise WhenceError("Give --rounds or the setting rounds in --settings, not both.")
    return given | ({} if rounds is None else {"rounds": rounds})
