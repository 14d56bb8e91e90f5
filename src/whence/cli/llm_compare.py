"""`whence llm compare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.llm_options import (
    SELECTIONS,
    Algorithm,
    Dataset,
    Demonstrations,
    Dtype,
    Layers,
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
    choose_task,
    parse_layers,
    parse_settings,
)
from whence.cli.options import On, Overwrite
from whence.cli.runs import run_comparison
from whence.errors import WhenceError
from whence.experiments import LanguageConfig
from whence.experiments.comparison import check_comparison
from whence.experiments.llm import training
from whence.experiments.llm.config import SOURCE


def compare(
    ctx: typer.Context,
    task: Task = None,
    size: Size = "small",
    arms: Annotated[
        str,
        typer.Option(help=f"Selections, separated by commas: {', '.join(SELECTIONS)}; with a target: iif-token."),
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
    layers: Layers = None,
    algorithm: Algorithm = "ppo",
    settings: Settings = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time. (default: one per core)", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for summary.json, report.html and the runs.")] = Path("out/llm"),
    on: On = "local",
    overwrite: Overwrite = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Train each selection on each seed, and tell what it gains and costs compared with training on every response.

    Interrupted, the same command goes on where it was.

    Example: whence llm compare --task arithmetic --arms none,iif-sequence,ippo --seeds 3
    """
    source = {name: ctx.params[name] for name in SOURCE}
    names = [arm_name(name.strip(), None) for name in arms.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise WhenceError(f"arms is {arms!r}; name each arm once. Known: {', '.join(SELECTIONS)}.")
    first_seed = [
        LanguageConfig(
            name,
            0,
            choose_task(task, source),
            **source,
            size=size,
            dtype=dtype,
            lora=lora,
            algorithm=algorithm,
            settings=parse_settings(settings, rounds),
        )
        for name in names
    ]
    if first_seed[0].task is None and test_dataset is None:
        raise WhenceError("Arms are compared by a test; give its prompts: --test-dataset.")
    layered = [
        config if config.target is None else replace(config, layers=parse_layers(layers)) for config in first_seed
    ]
    configs = [replace(config, seed=seed) for seed in range(seeds) for config in layered]
    check_comparison(configs, out, workers=workers, on=on)
    training.prepare(configs[0])  # above the bars, since a small model's own training has a bar too
    run_comparison(configs, out, workers=workers, overwrite=overwrite, on=on, json=json)
