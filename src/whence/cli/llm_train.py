"""`whence llm train`."""

from pathlib import Path
from typing import Annotated

import typer

from whence.cli.console import log_to_terminal
from whence.cli.llm_options import (
    SELECTIONS,
    Algorithm,
    Dataset,
    Demonstrations,
    Dtype,
    HeldOut,
    Layers,
    Lora,
    Model,
    RefreshTargetEvery,
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
    choose_task,
    parse_layers,
    parse_settings,
)
from whence.cli.options import Overwrite
from whence.cli.runs import show_run, train_run
from whence.experiments import LanguageConfig
from whence.experiments.llm import training
from whence.experiments.llm.arms import LANGUAGE_TARGETS
from whence.experiments.llm.config import SOURCE
from whence.experiments.shared import OnRound


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
    overwrite: Overwrite = False,
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
    layers: Layers = None,
    refresh_target_every: RefreshTargetEvery = 1,
    algorithm: Algorithm = "ppo",
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Train a language model on the responses that help, with PPO, GRPO or RLOO.

    In every round responses are drawn and rewarded, scored, selected, and trained on. The run directory holds prompts,
    responses, rewards and scores of every round; report.html in it shows them, model/ is what was trained. A finished
    run is left as it is. Interrupted at any moment, the same command goes on after the last checkpoint, and ends with
    the same bits.

    Example: whence llm train --task arithmetic --selection ippo
    """
    source = {name: ctx.params[name] for name in SOURCE}
    arm = arm_name(selection, target)
    config = LanguageConfig(
        arm,
        seed,
        choose_task(task, source),
        **source,
        size=size,
        dtype=dtype,
        lora=lora,
        held_out=held_out,
        layers=parse_layers(layers),
        refresh_target_every=refresh_target_every,
        algorithm=algorithm,
        settings=parse_settings(settings, rounds),
    )
    path = run or Path("runs") / f"{config.env.rstrip('/').rpartition('/')[2]}-{arm}-seed{seed}"
    log_to_terminal()
    training.prepare(config)
    was_finished = not overwrite and training.is_finished(config, path)

    def start(on_round: OnRound) -> None:
        training.run(config, path, on_round, overwrite=overwrite)

    train_run(config, path, start, on_repeat="goes on after the last checkpoint")
    show_run(config, path, was_finished=was_finished, json=json)
