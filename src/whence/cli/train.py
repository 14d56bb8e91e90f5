"""`whence train`."""

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from whence import experiments
from whence.cli import options
from whence.cli.console import log_to_terminal, parse_json_object
from whence.cli.options import parse_rounds
from whence.cli.runs import show_run, train_run
from whence.cli.settings import Settings, collect_overrides
from whence.errors import WhenceError
from whence.experiments.rl.config import HYPERPARAMETERS
from whence.experiments.rl.plan import check_read
from whence.experiments.shared import OnRound
from whence.experiments.sweepfile import READ

_PPO = "PPO, by Stable-Baselines3's names"


def _hyperparameter(name: str, about: str) -> Any:
    default = HYPERPARAMETERS[name]
    shown = str(default).lower() if isinstance(default, bool) else default
    return typer.Option(help=f"{about} (default: {shown})", rich_help_panel=_PPO, show_default=False)


# A pair of flags, --x and --no-x, would leave the help no room at 80 columns.
Truth: TypeAlias = Literal["true", "false"]


def train(
    ctx: typer.Context,
    env: options.Env = None,
    preset: options.Preset = None,
    selection: Annotated[str, typer.Option(help=f"Which records train: {options.describe_arms()}")] = "iif",
    drop: options.Drop = None,
    warmup: options.Warmup = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="What a record's score says it raises: return, or action (with the two below). (default: return)",
            show_default=False,
        ),
    ] = None,
    observation: options.Observation = None,
    action: options.Action = None,
    engine: options.Engine = None,
    rounds: options.Rounds = None,
    timesteps: Annotated[
        int | None, typer.Option(help="Time steps to train on, instead of --rounds.", show_default=False)
    ] = None,
    n_envs: options.NEnvs = None,
    env_kwargs: options.EnvKwargs = None,
    pool_kwargs: options.PoolKwargs = None,
    eval_episodes: Annotated[
        int | None,
        typer.Option(
            help="Episodes of an evaluation after each round; 0 makes none: training's own are recorded. (default: 0)",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    run: Annotated[
        Path | None,
        typer.Option(help="The run's directory. (default: runs/ENV-SELECTION-seed0)", show_default=False),
    ] = None,
    overwrite: options.Overwrite = False,
    record_rounds: Annotated[
        str | None,
        typer.Option(
            help="Rounds whose optimisation is recorded, to be replayed: 5,20 or 10-50 or, every tenth, 10-150:10.",
            metavar="ROUNDS",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard's files below this directory.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where the policy is trained: cpu, cuda, cuda:1, auto. (default: cpu)", show_default=False),
    ] = None,
    settings: Settings = None,
    json: options.AsJson = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="MlpPolicy, CnnPolicy or MultiInputPolicy. (default: what suits the observations)",
            rich_help_panel=_PPO,
            show_default=False,
        ),
    ] = None,
    policy_kwargs: Annotated[
        str | None,
        typer.Option(
            help='Passed to the policy, as JSON: {"net_arch": [64, 64]}.',
            metavar="JSON",
            rich_help_panel=_PPO,
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Adam, AdamW, RMSprop or SGD. (default: the preset's, or Adam)",
            rich_help_panel=_PPO,
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[float | None, _hyperparameter("learning_rate", "Step size.")] = None,
    n_steps: Annotated[int | None, _hyperparameter("n_steps", "Steps of each environment in a round.")] = None,
    batch_size: Annotated[int | None, _hyperparameter("batch_size", "Records in a minibatch.")] = None,
    n_epochs: Annotated[int | None, _hyperparameter("n_epochs", "Passes over the records of a round.")] = None,
    gamma: Annotated[float | None, _hyperparameter("gamma", "Discount factor.")] = None,
    gae_lambda: Annotated[float | None, _hyperparameter("gae_lambda", "Lambda of the advantage estimator.")] = None,
    clip_range: Annotated[
        float | None, _hyperparameter("clip_range", "How far the probability ratio may move.")
    ] = None,
    clip_range_vf: Annotated[float | None, _hyperparameter("clip_range_vf", "How far a value may move.")] = None,
    normalize_advantage: Annotated[
        Truth | None, _hyperparameter("normalize_advantage", "Normalise advantages in each minibatch.")
    ] = None,
    ent_coef: Annotated[float | None, _hyperparameter("ent_coef", "Weight of the entropy.")] = None,
    vf_coef: Annotated[float | None, _hyperparameter("vf_coef", "Weight of the value loss.")] = None,
    max_grad_norm: Annotated[
        float | None, _hyperparameter("max_grad_norm", "Gradients are clipped to it; inf: never.")
    ] = None,
    target_kl: Annotated[
        float | None, _hyperparameter("target_kl", "Stop a round's epochs above this divergence.")
    ] = None,
    use_sde: Annotated[Truth | None, _hyperparameter("use_sde", "Explore with state-dependent noise.")] = None,
    sde_sample_freq: Annotated[
        int | None, _hyperparameter("sde_sample_freq", "Steps between draws of that noise.")
    ] = None,
) -> None:
    """Train PPO on the records that help, and keep what happened in a run directory.

    After each rollout its records are scored, a rule selects which of them train, and Stable-Baselines3 optimises on
    those. The run directory holds scores, records, policies and figures of every round; report.html in it shows them.
    Interrupted at any moment, the same command goes on and ends with the same bits. A finished run is left as it is;
    with a larger --rounds it goes on.

    Example: whence train LunarLander-v3 --selection iif --drop 0.125 --rounds 20 --run runs/lander
    """
    hyperparameters = {name: ctx.params[name] for name in HYPERPARAMETERS if ctx.params[name] is not None}
    hyperparameters |= {
        name: text == "true" for name, text in hyperparameters.items() if isinstance(HYPERPARAMETERS[name], bool)
    }
    if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise WhenceError("--tensorboard needs TensorBoard: in whence's source tree, pip install '.[tensorboard]'.")
    overrides = collect_overrides(
        settings,
        preset,
        {
            "drop": drop,
            "warmup": warmup,
            "target": target,
            "target_args": options.parse_action(observation, action) or None,
            "engine": engine,
            "rounds": rounds,
            "eval_episodes": eval_episodes,
            "n_envs": n_envs,
            "policy": policy,
            "policy_kwargs": parse_json_object("--policy-kwargs", policy_kwargs, """'{"net_arch": [64, 64]}'"""),
            "optimizer": optimizer,
            "hyperparameters": hyperparameters,
            "device": device,
            **options.parse_env_settings(env_kwargs, pool_kwargs),
        },
    )
    _check_target(overrides)
    if timesteps is not None and "rounds" in overrides:
        raise WhenceError("Give --rounds or --timesteps, not both.")
    if timesteps is not None and timesteps < 1:
        raise WhenceError(f"--timesteps is {timesteps}; at least 1 is needed, such as 100000.")
    config = experiments.configure(
        env=env, preset=preset, arm=selection, seed=seed, **{"eval_episodes": 0, **overrides}
    )
    check_read([config], [name for name in READ if name in overrides])
    if not config.eval_episodes and (unused := [name for name in ("eval_every", "evaluate_with") if name in overrides]):
        raise WhenceError(
            f"{unused[0]} has no effect without evaluations. Give --eval-episodes as well, or leave it out."
        )
    if timesteps is not None:
        steps = {**HYPERPARAMETERS, **config.hyperparameters}["n_steps"]
        config = replace(config, rounds=math.ceil(timesteps / (steps * config.n_envs)))
    path = run or Path("runs") / f"{re.sub('[^A-Za-z0-9.-]+', '-', config.env)}-{config.arm}-seed{config.seed}"
    recordings = parse_rounds("--record-rounds", record_rounds)
    log_to_terminal()
    was_finished = not overwrite and experiments.is_finished(config, path)

    def start(on_round: OnRound) -> None:
        experiments.run(config, path, on_round, overwrite=overwrite, tensorboard=tensorboard, recordings=recordings)

    train_run(config, path, start)
    show_run(config, path, was_finished=was_finished, json=json)


def _check_target(overrides: Mapping[str, Any]) -> None:
    target = overrides.get("target", "return")
    if target == "return" and overrides.get("target_args"):
        raise WhenceError(
            f"--observation and --action belong to the target action; the target is {target}. Add --target action, or "
            "leave them out."
        )
    if target == "action" and not overrides.get("target_args", {}).keys() >= {"observation", "action"}:
        raise WhenceError("The target action needs --observation and --action, as JSON: --observation 14 --action 2.")
