"""`whence train`."""

import importlib.util
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from whence import experiments
from whence.cli import options
from whence.cli.console import errors, log_to_terminal, parse_json_object, print_json, print_line
from whence.cli.options import parse_rounds
from whence.cli.progress import RunBar
from whence.cli.settings import Settings, collect_overrides
from whence.cli.summary import describe_round
from whence.errors import WhenceError
from whence.experiments import HYPERPARAMETERS, RunConfig
from whence.experiments.rl.plan import check_read
from whence.experiments.sweepfile import READ
from whence.report import write_run_report
from whence.runs import RunDirectory

_PPO = "PPO, by Stable-Baselines3's names"


def _ppo(name: str, about: str) -> Any:
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
    learning_rate: Annotated[float | None, _ppo("learning_rate", "Step size.")] = None,
    n_steps: Annotated[int | None, _ppo("n_steps", "Steps of each environment in a round.")] = None,
    batch_size: Annotated[int | None, _ppo("batch_size", "Records in a minibatch.")] = None,
    n_epochs: Annotated[int | None, _ppo("n_epochs", "Passes over the records of a round.")] = None,
    gamma: Annotated[float | None, _ppo("gamma", "Discount factor.")] = None,
    gae_lambda: Annotated[float | None, _ppo("gae_lambda", "Lambda of the advantage estimator.")] = None,
    clip_range: Annotated[float | None, _ppo("clip_range", "How far the probability ratio may move.")] = None,
    clip_range_vf: Annotated[float | None, _ppo("clip_range_vf", "How far a value may move.")] = None,
    normalize_advantage: Annotated[
        Truth | None, _ppo("normalize_advantage", "Normalise advantages in each minibatch.")
    ] = None,
    ent_coef: Annotated[float | None, _ppo("ent_coef", "Weight of the entropy.")] = None,
    vf_coef: Annotated[float | None, _ppo("vf_coef", "Weight of the value loss.")] = None,
    max_grad_norm: Annotated[float | None, _ppo("max_grad_norm", "Gradients are clipped to it; inf: never.")] = None,
    target_kl: Annotated[float | None, _ppo("target_kl", "Stop a round's epochs above this divergence.")] = None,
    use_sde: Annotated[Truth | None, _ppo("use_sde", "Explore with state-dependent noise.")] = None,
    sde_sample_freq: Annotated[int | None, _ppo("sde_sample_freq", "Steps between draws of that noise.")] = None,
) -> None:
    """Train PPO on the records that help, and keep what happened in a run directory.

    After each rollout its records are scored, a rule selects which of them train, and Stable-Baselines3 optimises on
    those. The run directory holds scores, records, policies and figures of every round; report.html in it shows them.
    A finished run is left as it is; an unfinished one is started over.

    Example: whence train LunarLander-v3 --selection iif --drop 0.125 --run runs/lander
    """
    given = {name: ctx.params[name] for name in HYPERPARAMETERS if ctx.params[name] is not None}
    given |= {name: text == "true" for name, text in given.items() if isinstance(HYPERPARAMETERS[name], bool)}
    if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise WhenceError("--tensorboard needs TensorBoard: in whence's source tree, pip install '.[tensorboard]'.")
    asked = collect_overrides(
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
            "hyperparameters": given,
            "device": device,
            **options.parse_env_settings(env_kwargs, pool_kwargs),
        },
    )
    _check_target(asked)
    if timesteps is not None and "rounds" in asked:
        raise WhenceError("Give --rounds or --timesteps, not both.")
    config = experiments.configure(env=env, preset=preset, arm=selection, seed=seed, **{"eval_episodes": 0, **asked})
    check_read([config], [name for name in READ if name in asked])
    if not config.eval_episodes and (idle := [name for name in ("eval_every", "evaluate_with") if name in asked]):
        raise WhenceError(
            f"{idle[0]} has no effect without evaluations. Give --eval-episodes as well, or leave it out."
        )
    if timesteps is not None:
        n_steps = {**HYPERPARAMETERS, **config.hyperparameters}["n_steps"]
        config = replace(config, rounds=math.ceil(timesteps / (n_steps * config.n_envs)))
    path = run or Path("runs") / f"{re.sub('[^A-Za-z0-9.-]+', '-', config.env)}-{config.arm}-seed{config.seed}"
    log_to_terminal()
    was_finished = experiments.is_finished(config, path)
    _run(config, path, tensorboard, parse_rounds("--record-rounds", record_rounds))
    directory = RunDirectory.open(path)
    write_run_report(directory, path / "report.html")
    metrics = directory.table("metrics").to_dicts()[-1]
    evaluations = directory.table("evaluations")
    if not evaluations.is_empty():
        metrics["test_return"] = evaluations["test_return"][-1]
    if json:
        print_json({"run": str(path), "config": config.to_json(), "last_round": metrics})
        return
    done = "was finished already" if was_finished else f"{config.rounds} rounds done"
    last = ", ".join(describe_round(metrics)) or "–"
    print_line(f"{config.env}, {config.arm}, seed {config.seed}: {done}. Last round: {last}")
    print_line(f"Run:  {path}")
    print_line(f"Page: {path / 'report.html'}")


def _run(config: RunConfig, path: Path, tensorboard: Path | None, recordings: Collection[int]) -> None:
    """Train below a bar; Ctrl-C says what there is."""
    try:
        with RunBar(config.rounds) as bar:
            experiments.run(config, path, bar.update, tensorboard=tensorboard, recordings=recordings)
    except KeyboardInterrupt:
        done = f"Interrupted after {bar.rounds} of {config.rounds} rounds. They are in {path}:"
        errors.print(done, soft_wrap=True)
        errors.print(f"  whence report {path}", highlight=False, soft_wrap=True)
        errors.print("The same command starts the run over.")
        raise typer.Exit(130) from None


def _check_target(asked: Mapping[str, Any]) -> None:
    target = asked.get("target", "return")
    if target == "return" and asked.get("target_args"):
        raise WhenceError(f"--observation and --action belong to the target action; the target is {target}.")
    if target == "action" and not asked.get("target_args", {}).keys() >= {"observation", "action"}:
        raise WhenceError("The target action needs --observation and --action, as JSON: --observation 14 --action 2.")
