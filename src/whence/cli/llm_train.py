"""`whence llm train`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from whence.cli.console import console, errors, log_to_terminal, print_json, print_line
from whence.cli.llm_options import (
    SELECTIONS,
    Algorithm,
    Dataset,
    Demonstrations,
    Dtype,
    HeldOut,
    Lora,
    Model,
    Reward,
    RewardLabel,
    RewardModel,
    Rounds,
    Settings,
    Size,
    Task,
    TestDataset,
    TestReward,
    arm_name,
    parse_settings,
    task_or_none,
)
from whence.cli.progress import RunBar
from whence.cli.summary import describe_round
from whence.experiments import LANGUAGE_TARGETS, LanguageConfig
from whence.experiments.llm import training
from whence.experiments.llm.config import SOURCE
from whence.report import write_run_report
from whence.runs import RunDirectory


def train(
    ctx: typer.Context,
    task: Task = None,
    size: Size = "small",
    selection: Annotated[str, typer.Option(help=f"Which responses train: {', '.join(SELECTIONS)}.")] = "ippo",
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
    arm = arm_name(selection, target)
    config = LanguageConfig(
        arm,
        seed,
        task_or_none(task, source),
        **source,
        size=size,
        dtype=dtype,
        lora=lora,
        held_out=held_out,
        algorithm=algorithm,
        settings=parse_settings(settings, rounds),
    )
    path = run or Path("runs") / f"{config.env.rstrip('/').rpartition('/')[2]}-{arm}-seed{seed}"
    log_to_terminal()
    training.prepare(config)
    if dry_run:
        _rehearse(config, json)
        return
    was_finished = training.is_finished(config, path)
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
    print_line(f"{config.env}, {arm}, seed {seed}: {done}. Last round: {', '.join(describe_round(last)) or '–'}")
    print_line(f"Run:   {path}")
    print_line(f"Model: {path / 'model'}")
    print_line(f"Page:  {path / 'report.html'}")


def _rehearse(config: LanguageConfig, json: bool) -> None:
    """Tell what a run would take."""
    from whence.experiments.llm.estimate import estimate_run

    found = estimate_run(config)
    if json:
        print_json({"config": config.to_json(), "estimate": found.to_json()})
        return
    print_line(
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
    print_line("Bytes are of tensors; an allocator takes more. A reward's own model comes on top.")
    print_line(
        "Work is of linear layers: 1 PFLOP takes about 10 s at 100 TFLOP/s. Drawing responses takes longer than that,"
    )
    print_line("since each token reads all weights.")
    print_line("No weights were loaded, and nothing was trained: leave --dry-run out to begin.")


def _amount(held: int) -> str:
    return f"{held / 2**30:.2f} GiB" if held >= 2**30 else f"{held / 2**20:.1f} MiB"


def _run(config: LanguageConfig, path: Path) -> None:
    try:
        with RunBar(config.rounds) as bar:
            training.run(config, path, bar.update)
    except KeyboardInterrupt:
        done = f"Interrupted after {bar.rounds} of {config.rounds} rounds. They are in {path}:"
        errors.print(done, soft_wrap=True)
        errors.print(f"  whence report {path}", highlight=False, soft_wrap=True)
        kept = "goes on from the last checkpoint" if config.settings.get("save_every") else "starts the run over"
        errors.print(f"The same command {kept}.")
        raise typer.Exit(130) from None
