"""`whence compare`."""

from pathlib import Path
from typing import Annotated

import typer

from whence import experiments
from whence.cli import options
from whence.cli.runs import run_comparison
from whence.cli.settings import Settings, collect_overrides
from whence.experiments.rl.plan import check_read
from whence.experiments.sweepfile import READ


def compare(
    env: options.Env = None,
    preset: options.Preset = None,
    arms: Annotated[
        str, typer.Option(help=f"Ways to train, separated by commas: {options.describe_arms()}")
    ] = "ppo,iif,random",
    seeds: Annotated[int, typer.Option(help="Runs per arm, with seeds 0, 1, ...")] = 3,
    rounds: options.Rounds = None,
    drop: options.Drop = None,
    warmup: options.Warmup = None,
    eval_episodes: Annotated[
        int | None,
        typer.Option(help="Episodes of each evaluation. (default: the preset's, or 100)", show_default=False),
    ] = None,
    n_envs: options.NEnvs = None,
    env_kwargs: options.EnvKwargs = None,
    pool_kwargs: options.PoolKwargs = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time. (default: one per core)", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for summary.json, report.html and the runs.")] = Path(
        "out/compare"
    ),
    on: options.On = "local",
    overwrite: options.Overwrite = False,
    settings: Settings = None,
    json: options.AsJson = False,
) -> None:
    """Train each arm on each seed, and tell how many rounds and how much time it saves compared with plain PPO.

    Interrupted, the same command goes on where it was. Evaluation samples actions, after every round.

    Example: whence compare --preset lda-code/frozenlake --arms ppo,iif,random --seeds 3
    """
    overrides = collect_overrides(
        settings,
        preset,
        {
            "drop": drop,
            "warmup": warmup,
            "rounds": rounds,
            "eval_episodes": eval_episodes,
            "n_envs": n_envs,
            **options.parse_env_settings(env_kwargs, pool_kwargs),
        },
    )
    names = [name.strip() for name in arms.split(",") if name.strip()]
    configs = experiments.plan_comparison(env=env, preset=preset, arms=names, seeds=seeds, **overrides)
    check_read(configs, [name for name in READ if name in overrides])
    run_comparison(configs, out, workers=workers, overwrite=overwrite, on=on, json=json)
