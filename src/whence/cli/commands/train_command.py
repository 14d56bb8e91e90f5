"""`whence train`, `whence compare`, `whence llm train` and `whence llm compare`."""

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from whence import lab
from whence.cli import terminal
from whence.cli.terminal import options
from whence.core import WhenceError, suggest
from whence.lab.language import plan_language_comparison
from whence.page import COMPARED_ROUNDS, ExploredRun, spread, write_report
from whence.runs import RunDirectory
from whence.sb3.models import HYPERPARAMETERS
from whence.stored.language import SOURCE, TASK_FIELDS, LanguageConfig

_ABOUT_PPO = {
    "learning_rate": "step size",
    "n_steps": "steps of each environment in a round",
    "batch_size": "records in a minibatch",
    "n_epochs": "passes over the records of a round",
    "gamma": "discount factor",
    "gae_lambda": "lambda of the advantage estimator",
    "clip_range": "how far the probability ratio may move",
    "clip_range_vf": "how far a value may move",
    "normalize_advantage": "normalise advantages in each minibatch",
    "ent_coef": "weight of the entropy",
    "vf_coef": "weight of the value loss",
    "max_grad_norm": "gradients are clipped to it; inf: never",
    "target_kl": "stop a round's epochs above this divergence",
    "use_sde": "explore with state-dependent noise",
    "sde_sample_freq": "steps between draws of that noise",
}
_PPO = "PPO, by Stable-Baselines3's names"
_NETWORK = ("policy", "policy_kwargs", "optimizer")
_ELSEWHERE = ("env", "arm", "seed", "hyperparameters", "target_args", *_NETWORK)
_FIELDS = [each.name for each in fields(lab.RunConfig) if each.name not in _ELSEWHERE]
_PANEL = "The run, by the names of its config.json"


def _make_run_options(**defaults: Any) -> list[terminal.FieldOption]:
    return [
        *terminal.make_field_options(lab.RunConfig, names=_FIELDS, panel=_PANEL, defaults=defaults),
        *terminal.make_field_options(
            lab.RunConfig, names=_NETWORK, panel=_PPO, defaults={"policy": "what suits the observations"}
        ),
        *(
            terminal.FieldOption(name, [float if default is None else type(default)], _ABOUT_PPO[name], default, _PPO)
            for name, default in HYPERPARAMETERS.items()
        ),
    ]


_TRAIN_OPTIONS, _COMPARE_OPTIONS = _make_run_options(eval_episodes=0), _make_run_options()

_NONE = "none"
"""The name of the standard arm of language models on the command line; results use the standard arm's own."""

_SELECTIONS = ", ".join(_NONE if arm == lab.STANDARD else arm for arm in lab.LANGUAGE_ARMS)
_OTHERS = [each.name for each in fields(LanguageConfig) if each.name not in ("arm", "seed", "settings", *SOURCE)]
_LANGUAGE_OPTIONS = [
    *terminal.make_field_options(LanguageConfig, names=_OTHERS, panel=_PANEL),
    *terminal.make_field_options(LanguageConfig, names=SOURCE, panel="A model and data of your own"),
]

_ARMS = f"{', '.join(lab.ARMS)}; `whence list arms` tells what they do."

Preset: TypeAlias = Annotated[
    str | None,
    options.optional(
        help=f"A built-in set-up instead of ENV, with defaults of its own. Known: {', '.join(lab.read_presets())}."
    ),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of everything random.")]
Run: TypeAlias = Annotated[
    Path | None, options.optional(help="The run's directory. (default: runs/NAME-SELECTION-seed0)")
]
Seeds: TypeAlias = Annotated[int, typer.Option(help="Runs per arm, with seeds 0, 1, ...", min=1)]
Out: TypeAlias = Annotated[Path, typer.Option(help="Directory for summary.json, report.html and the runs.")]
LanguageSettings: TypeAlias = Annotated[
    str | None,
    options.optional(
        help='Settings of whence.llm.PPOConfig, or TRL\'s GRPOConfig or RLOOConfig, as JSON: {"learning_rate": 1e-5}.',
        metavar="JSON",
    ),
]
LanguageRounds: TypeAlias = Annotated[
    int | None, options.optional(help="Rollouts to train on. (default: the task's, or 100)")
]


@terminal.with_options(_TRAIN_OPTIONS)
def train(
    env: options.Env = None,
    preset: Preset = None,
    selection: Annotated[str, typer.Option(help=f"Which records train: {_ARMS}")] = "iif",
    observation: options.Observation = None,
    action: options.Action = None,
    timesteps: Annotated[
        int | None, options.optional(help="Time steps to train on, instead of --rounds.", min=1)
    ] = None,
    seed: Seed = 0,
    run: Run = None,
    overwrite: options.Overwrite = False,
    record_rounds: Annotated[
        str | None,
        options.optional(
            help="Rounds whose optimisation is recorded, to be replayed: 5,20 or 10-50 or, every tenth, 10-150:10.",
            metavar="ROUNDS",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, options.optional(help="Write TensorBoard's files below this directory.")
    ] = None,
    json: options.AsJson = False,
    **values: Any,
) -> None:
    """Train PPO on the records that help, and keep what happened in a run directory.

    After each rollout its records are scored, a rule selects which of them train, and Stable-Baselines3 optimises on
    those. The run directory holds scores, records, policies and figures of every round; report.html in it shows them.
    Interrupted at any moment, the same command goes on and ends with the same bits. A finished run is left as it is;
    with a larger --rounds it goes on. Nothing is evaluated, unless --eval-episodes says so.

    Example: whence train LunarLander-v3 --selection iif --drop 0.125 --rounds 20 --run runs/lander
    """
    if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise WhenceError("--tensorboard needs TensorBoard: in whence's source tree, pip install '.[tensorboard]'.")
    overrides = _collect_run_fields(observation, action, values)
    config = lab.configure(env=env, preset=preset, arm=selection, seed=seed, **{"eval_episodes": 0, **overrides})
    if timesteps is not None:
        steps = {**HYPERPARAMETERS, **config.hyperparameters}["n_steps"]
        config = replace(config, rounds=math.ceil(timesteps / (steps * config.n_envs)))
    recordings = terminal.parse_rounds("--record-rounds", record_rounds)
    _train(config, run, config.env, overwrite=overwrite, json=json, tensorboard=tensorboard, recordings=recordings)


@terminal.with_options(_COMPARE_OPTIONS)
def compare(
    env: options.Env = None,
    preset: Preset = None,
    arms: Annotated[str, typer.Option(help=f"Ways to train, separated by commas: {_ARMS}")] = "ppo,iif,random",
    seeds: Seeds = 3,
    observation: options.Observation = None,
    action: options.Action = None,
    workers: options.Workers = None,
    out: Out = Path("out/compare"),
    on: options.On = "local",
    overwrite: options.Overwrite = False,
    json: options.AsJson = False,
    **values: Any,
) -> None:
    """Train each arm on each seed, and tell how many rounds and how much time it saves compared with plain PPO.

    Interrupted, the same command goes on where it was. Evaluation samples actions, after every round.

    Example: whence compare --preset lda-code/frozenlake --arms ppo,iif,random --seeds 3
    """
    overrides = _collect_run_fields(observation, action, values)
    configs = lab.plan_comparison(env=env, preset=preset, arms=_split_names(arms), seeds=seeds, **overrides)
    _compare(configs, out, workers=workers, overwrite=overwrite, on=on, json=json)


@terminal.with_options(_LANGUAGE_OPTIONS)
def train_language(
    selection: Annotated[str, typer.Option(help=f"Which responses train: {_SELECTIONS}.")] = "ippo",
    target: Annotated[
        str | None,
        options.optional(
            help=f"What a response's score says it raises: {', '.join(lab.LANGUAGE_TARGETS)}. "
            "(default: sequence for iif, validation for ippo)"
        ),
    ] = None,
    rounds: LanguageRounds = None,
    seed: Seed = 0,
    run: Run = None,
    overwrite: options.Overwrite = False,
    settings: LanguageSettings = None,
    json: options.AsJson = False,
    **values: Any,
) -> None:
    """Train a language model on the responses that help, with PPO, GRPO or RLOO.

    In every round responses are drawn and rewarded, scored, selected, and trained on. The run directory holds prompts,
    responses, rewards and scores of every round; report.html in it shows them, model/ is what was trained. A finished
    run is left as it is. Interrupted at any moment, the same command goes on after the last checkpoint, and ends with
    the same bits.

    Example: whence llm train --task arithmetic --selection ippo
    """
    arm = _name_arm(selection, target)
    config = LanguageConfig(arm, seed, settings=_parse_settings(settings, rounds), **_collect_language_fields(values))
    _train(config, run, config.env.rstrip("/").rpartition("/")[2], overwrite=overwrite, json=json)


@terminal.with_options(_LANGUAGE_OPTIONS)
def compare_language(
    arms: Annotated[
        str, typer.Option(help=f"Selections, separated by commas: {_SELECTIONS}; with a target: iif-token.")
    ] = "none,random,iif-sequence,iif-token,ippo,ippo-unweighted",
    seeds: Seeds = 3,
    rounds: LanguageRounds = None,
    workers: options.Workers = None,
    out: Out = Path("out/llm"),
    on: options.On = "local",
    overwrite: options.Overwrite = False,
    settings: LanguageSettings = None,
    json: options.AsJson = False,
    **values: Any,
) -> None:
    """Train each selection on each seed, and tell what it gains and costs compared with training on every response.

    Interrupted, the same command goes on where it was. How responses are scored is set for the arms that score, the
    unit for those that have a choice. random-ARM is ARM's control: as many, at random.

    Example: whence llm compare --task arithmetic --arms none,iif-sequence,ippo --seeds 3
    """
    names = [_name_arm(name) for name in _split_names(arms)]
    if not names or len(set(names)) < len(names):
        raise WhenceError(f"arms is {arms!r}; name each arm once. Known: {_SELECTIONS}.")
    overrides = _collect_language_fields(values)
    configs = plan_language_comparison(names, seeds, settings=_parse_settings(settings, rounds), **overrides)
    lab.runner_of(configs[0]).prepare(configs[0])  # above the bars, since a small model's own training has a bar too
    _compare(configs, out, workers=workers, overwrite=overwrite, on=on, json=json)


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _collect_run_fields(observation: str | None, action: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an agent's run that a command line sets, for `configure`."""
    overrides = terminal.parse_fields(_TRAIN_OPTIONS, values)
    hyperparameters = {name: overrides.pop(name) for name in HYPERPARAMETERS if name in overrides}
    tables = {"hyperparameters": hyperparameters, "target_args": options.parse_action(observation, action)}
    return overrides | {name: table for name, table in tables.items() if table}


def _collect_language_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a language model's run that a command line sets."""
    overrides = terminal.parse_fields(_LANGUAGE_OPTIONS, values)
    if any(name in overrides for name in SOURCE):  # A model of one's own is no task; both are refused.
        overrides.setdefault("task", None)
    return {**TASK_FIELDS.get(overrides.get("task"), {}), **overrides}


def _name_arm(selection: str, target: str | None = None) -> str:
    """Return the arm of a selection and a target."""
    if lab.split_arm(selection)[0].removeprefix(lab.CONTROL) not in (_NONE, *lab.LANGUAGE_ARMS):
        raise WhenceError(f"The selection {selection!r} is unknown.{suggest(selection, _SELECTIONS.split(', '))}")
    selection = lab.STANDARD if selection == _NONE else selection
    return selection if target is None else f"{selection}-{target}"


def _parse_settings(text: str | None, rounds: int | None) -> dict[str, Any]:
    """Return the trainer's settings that --settings and --rounds set."""
    values = terminal.parse_json("--settings", text, """'{"learning_rate": 1e-5}'""", dict) or {}
    return values | ({} if rounds is None else {"rounds": rounds})


def _train(config: lab.AnyConfig, run: Path | None, name: str, *, overwrite: bool, json: bool, **settings: Any) -> None:
    """Train below a progress bar, write the run's page, and print its last round and where its files are."""
    path = run or Path("runs") / f"{re.sub('[^A-Za-z0-9.-]+', '-', name)}-{config.arm}-seed{config.seed}"
    terminal.log_to_terminal()
    runner: Any = lab.runner_of(config)
    runner.prepare(config)
    with terminal.resumable(), terminal.RunBar(config.rounds) as bar:
        runner.run(config, path, bar.update, overwrite=overwrite, **settings)
    directory, page = RunDirectory.open(path), path / "report.html"
    with terminal.RoundBar() as bar_of_page:
        rounds = spread(directory.rounds(), COMPARED_ROUNDS)
        shown = ExploredRun(directory, about=terminal.describe_training(directory))
        write_report(shown, page, rounds=rounds, on_round=bar_of_page.update)
    last_round = (directory.table("metrics").to_dicts() or [{}])[-1]  # they may be lost
    evaluations = directory.table("evaluations")
    last_round |= {} if evaluations.is_empty() else evaluations.to_dicts()[-1]
    if json:
        terminal.print_json({"run": str(path), "config": config.to_json(), "last_round": last_round})
        return
    words = ", ".join(terminal.describe_round(last_round)) or "–"
    terminal.print_line(
        f"{config.env}, {config.arm}, seed {config.seed}: {config.rounds} rounds done. Last round: {words}"
    )
    model = {"Model": path / "model"} if isinstance(config, LanguageConfig) else {}
    terminal.print_paths({"Run": path, **model, "Page": page})


def _compare(configs: Sequence[lab.AnyConfig], out: Path, *, json: bool, **settings: Any) -> None:
    """Run a comparison below progress bars, write its page, and print its result."""
    planned = [lab.Planned(None, config.arm, config) for config in configs]
    with terminal.resumable(), terminal.PlannedBars(planned) as bars:
        comparison = lab.compare(configs, out, watch=bars, **settings)
    with terminal.RoundBar() as rounds_bar:
        lab.write_comparison(comparison, out / "report.html", on_round=rounds_bar.update)
    if json:
        terminal.print_json({"environments": comparison.summary})
        return
    _print_comparison(comparison)
    terminal.print_paths({"Numbers": out / "summary.json", "Page": out / "report.html"})


def _print_comparison(comparison: lab.Comparison) -> None:
    """Print a verdict on each arm, the table of metrics, and how to read it."""
    ((env, _),) = comparison.summary.items()
    summary = lab.make_summary(comparison)
    seeds = len({config.seed for config in comparison.configs})
    for verdict in summary.verdicts:
        terminal.print_line(verdict)
    lines = [("metric", *summary.headings)]
    lines += [(metric, *(" ".join(cell).strip() for cell in cells)) for metric, cells in summary.rows]
    if len(summary.headings) > len(summary.rows):  # many arms fit on a screen one below the other
        lines = [*zip(*lines, strict=True)]
    title = f"{env}, {seeds} seeds, {comparison.configs[0].rounds} rounds"
    table = terminal.make_table(title, lines[0], lines[1:])
    for column in table.columns[1:]:
        column.justify = "right"
    terminal.console.print(table)
    terminal.console.print(lab.READING, style="dim", markup=False)
