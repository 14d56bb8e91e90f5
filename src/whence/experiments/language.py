"""One post-training run of a language model: what it is, and how it is run. Transformers is imported when one is."""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from whence.engines import ENGINES
from whence.errors import RunDirectoryError, WhenceError, nearest
from whence.experiments.language_arms import LANGUAGE_ARMS, LANGUAGE_TARGETS, split_arm
from whence.experiments.metrics import Curve
from whence.runs import RunDirectory
from whence.selection import SelectionRule

if TYPE_CHECKING:
    from whence.experiments.tasks import Task

Seen = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of rounds done, from 0, and the last one's metrics."""


ALGORITHMS = ("ppo", "grpo", "rloo")
DTYPES = ("float32", "bfloat16")

TASKS = ("arithmetic", "civility")
"""Laboratories by name."""


@dataclass(frozen=True)
class LanguageConfig:
    """One run of PPO on a language model; everything its results depend on.

    Attributes:
        arm: a key of `LANGUAGE_ARMS`, or one with the target after a hyphen: "iif-token".
        seed: of everything random in the run.
        task: a key of `TASKS`; None: the model and data that the next eight name.
        model: directory or id of a causal language model of Transformers.
        dataset: directory or id of a data set with the column "prompt".
        reward: a function "file.py:function" or "package.module:function", as `PPOTrainer` takes it.
        reward_model: in its place, directory or id of a sequence classifier, whose logit is the reward.
        reward_label: of the classifier's labels, the one whose logit it is; None: its only one.
        demonstrations: directory or id of a data set with "prompt" and "completion", for the target "validation".
        test_dataset: directory or id of a data set whose prompts the trained model is measured on; None: it is not.
        test_reward: a function, as above, that it is measured by; None: the reward.
        size: of the task's laboratory.
        dtype: of the model's parameters: "float32" or "bfloat16".
        lora: rank of an adapter that is trained in place of the model; 0: the model is.
        held_out: prompts set aside, to which the target's responses are drawn in every round; 0: the target is taken
            over the rows that are scored.
        test_problems: how many of the test's prompts are answered in an evaluation.
        samples: answers drawn to each, beside the greedy one.
        engine: see `whence.attribute`.
        algorithm: "ppo" (whence's own), "grpo" or "rloo" (TRL's).
        settings: of `PPOConfig`, or of TRL's GRPOConfig or RLOOConfig and `rounds` and `eval_every`, that are not the
            task's own.
    """

    arm: str
    seed: int
    task: str | None = "arithmetic"
    model: str | None = None
    dataset: str | None = None
    reward: str | None = None
    reward_model: str | None = None
    reward_label: str | None = None
    demonstrations: str | None = None
    test_dataset: str | None = None
    test_reward: str | None = None
    size: str = "small"
    dtype: str = "float32"
    lora: int = 0
    held_out: int = 0
    test_problems: int = 512
    samples: int = 4
    engine: str = "auto"
    algorithm: str = "ppo"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        selection, target = split_arm(self.arm)
        if selection not in LANGUAGE_ARMS:
            raise WhenceError(f"The selection {selection!r} is unknown.{nearest(selection, LANGUAGE_ARMS)}")
        if target is not None and target not in LANGUAGE_TARGETS:
            raise WhenceError(f"The target {target!r} is unknown.{nearest(target, LANGUAGE_TARGETS)}")
        if target is not None and LANGUAGE_ARMS[selection].target is None:
            raise WhenceError(f"The target {target!r} has no effect: {selection} scores nothing. Leave it out.")
        if self.task is not None and self.task not in TASKS:
            raise WhenceError(f"The task {self.task!r} is unknown.{nearest(self.task, TASKS)}")
        if self.dtype not in DTYPES:
            raise WhenceError(f"The dtype {self.dtype!r} is unknown.{nearest(self.dtype, DTYPES)}")
        if self.dtype == "bfloat16" and not self.lora:
            raise WhenceError(
                "bfloat16 parameters are too coarse for the steps that are taken on them. Train an adapter (--lora "
                "16), or hold them in float32 and set ACCELERATE_MIXED_PRECISION=bf16."
            )
        if self.algorithm not in ALGORITHMS:
            raise WhenceError(f"The algorithm {self.algorithm!r} is unknown.{nearest(self.algorithm, ALGORITHMS)}")
        if self.engine not in ("auto", *ENGINES):
            raise WhenceError(f"The engine {self.engine!r} is unknown.{nearest(self.engine, ['auto', *ENGINES])}")
        for name, least in (("seed", 0), ("lora", 0), ("held_out", 0), ("test_problems", 1), ("samples", 1)):
            if getattr(self, name) < least:
                raise WhenceError(f"{name} is {getattr(self, name)}; at least {least} is needed.")
        self._check_source()
        if self.held_out and self.target not in ("sequence", "token", "held-out"):
            raise WhenceError(
                f"held_out is {self.held_out}, and the arm {self.arm} takes its target over no responses of held-out "
                "prompts. Leave it out, or take an arm with the target sequence or token."
            )
        if (self.held_out or self.target == "held-out") and self.algorithm != "ppo":
            raise WhenceError(f"held_out is of PPO; with {self.algorithm} the target is taken over the completions.")
        self.trained_by("runs/checked")

    def _check_source(self) -> None:
        named = {name: getattr(self, name) for name in SOURCE if getattr(self, name) is not None}
        if self.task is not None and named:
            raise WhenceError(
                f"{next(iter(named))} and the task {self.task} were both given; the task has its own. Give task=None "
                "(leave --task out)."
            )
        missing = [name for name in ("model", "dataset") if name not in named]
        missing += ["reward"] if self.reward is None and self.reward_model is None else []
        if self.task is None and missing:
            raise WhenceError(
                f"Neither a task nor {missing[0]} was given. Give --task {' or '.join(TASKS)}, or --model, --dataset "
                "and --reward or --reward-model."
            )
        if self.reward is not None and self.reward_model is not None:
            raise WhenceError(
                f"The reward is {self.reward}, and {self.reward_model} too. Give one; a function can call the model."
            )
        if self.reward_label is not None and self.reward_model is None:
            raise WhenceError(f"reward_label is {self.reward_label!r}, and there is no reward_model that has labels.")
        if self.test_reward is not None and self.test_dataset is None:
            raise WhenceError("test_reward says what to measure by, and there is nothing to measure on: test_dataset.")
        if self.task == "civility" and self.target == "validation":
            raise WhenceError(f"The arm {self.arm} scores by trusted demonstrations; the task civility has none.")
        if self.task is None and self.target == "validation" and self.demonstrations is None:
            raise WhenceError(
                f"The arm {self.arm} scores by trusted demonstrations; give a data set of them (--demonstrations)."
            )

    @property
    def target(self) -> str | None:
        """What scores are of; None where nothing is scored."""
        selection, target = split_arm(self.arm)
        return target or LANGUAGE_ARMS[selection].target

    @property
    def env(self) -> str:
        """What is trained on, for headings."""
        return self.task or str(self.model)

    @property
    def rounds(self) -> int:
        """Rollouts to train on."""
        if self.algorithm == "ppo":
            return int(self.trained_by("runs/checked").rounds)
        from whence.experiments.groups import rounds_of

        return rounds_of(self)

    @property
    def eval_episodes(self) -> int:
        """Problems of an evaluation, for headings."""
        return self.test_problems

    def trained_by(self, output_dir: str) -> Any:
        """Return the `PPOConfig`, or TRL's GRPOConfig or RLOOConfig.

        Raises:
            WhenceError: a setting that it does not have, or one out of its range.
        """
        if self.algorithm != "ppo":
            from whence.experiments.groups import group_config

            return group_config(self, output_dir)
        from whence.experiments.tasks import ppo_of
        from whence.llm import PPOConfig

        known = PPOConfig.__dataclass_fields__
        if unknown := [name for name in self.settings if name not in known or name in ("output_dir", "seed")]:
            raise WhenceError(f"A run's PPO has no setting {unknown[0]!r}.{nearest(unknown[0], known)}")
        quiet = {"disable_tqdm": True}  # commands have bars of their own
        own = ppo_of(self.task, self.size)
        return PPOConfig(output_dir, **{**quiet, **own, **self.settings, "seed": self.seed})

    def rule(self) -> SelectionRule:
        """Return the arm's selection rule."""
        return LANGUAGE_ARMS[split_arm(self.arm)[0]].rule(self.seed)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_json` gave."""
        return cls(**values)


SOURCE = (
    *("model", "dataset", "reward", "reward_model", "reward_label"),
    *("demonstrations", "test_dataset", "test_reward"),
)
"""The fields that name a model and data of the user's."""


def prepare(config: LanguageConfig) -> None:
    """Make the laboratory of a run below a bar, where it is not on disk: else each worker would."""
    from whence.llm.lab import arithmetic, civility

    if config.task == "arithmetic":
        arithmetic(size=config.size)
    elif config.task == "civility":
        civility(size=config.size)


def run(config: LanguageConfig, path: Path, on_round: Seen = lambda number, metrics: None) -> None:
    """Train and evaluate as `config` says, and write the run's directory; a finished run is left as it is.

    A run that was broken off goes on from its last checkpoint, where `save_every` has made any.

    Args:
        config: what to run.
        path: the run's directory.
        on_round: told of every round.

    Raises:
        RunDirectoryError: the directory holds another run.
        WhenceError: what the model, the data or PPO refuses.
    """
    from whence.experiments.tasks import task_of
    from whence.llm.bars import hidden_bars

    if is_finished(config, path):
        on_round(config.rounds, {})
        return
    torch.manual_seed(config.seed)  # an adapter's weights are drawn
    if config.algorithm != "ppo":
        from whence.experiments.groups import run_groups

        run_groups(config, path, on_round)
        return
    with hidden_bars():
        trainer = make_trainer(config, task_of(config), path, on_round)
    on_round(0, {})
    trainer.train(resume=True)
    with hidden_bars():
        kept(path / "model", trainer.save_model)  # last of all, since a run with its model counts as finished


def kept(folder: Path, save: Callable[[Path], object]) -> None:
    """Have a model saved beside its place and put there then: under its name there is a whole one or none."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (temporary, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    save(temporary)
    temporary.rename(folder)


def make_trainer(
    config: LanguageConfig, task: "Task", path: Path, on_round: Seen = lambda number, metrics: None
) -> Any:
    """Return the trainer of a run, which has not begun."""
    from whence.llm import PPOTrainer, SequenceReturn, TokenReturn

    kinds = {"sequence": SequenceReturn, "token": TokenReturn, "held-out": SequenceReturn}
    target: Any = kinds.get(config.target or "sequence")
    prompts, held_out = parted(config, task)
    return PPOTrainer(
        config.trained_by(str(path)),
        task.model,
        task.tokenizer,
        task.reward,
        prompts,
        rule=config.rule(),
        target=validation_of(task) if target is None else target(),
        held_out=held_out,
        engine=config.engine,
        memory=scoring_memory(config),
        evaluate=task.evaluate,
        about=described(config),
        seen=lambda rollout, influence, selection, row: on_round(row["round"], row),
    )


def described(config: LanguageConfig) -> dict[str, Any]:
    """Return what a run's directory says of it, in JSON types; of a reward's file also what is in it."""
    files = {name: (getattr(config, name) or "").rpartition(":")[0] for name in ("reward", "test_reward")}
    contents = {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if file.endswith(".py") and Path(file).exists()
    }
    return {"arm": config.arm, "env": config.env, "experiment": config.to_json(), "contents": contents}


def scoring_memory(config: LanguageConfig) -> int | None:
    """Return the bytes that scoring may hold; None: what a training step holds. Laboratories are small."""
    return None if config.task is None else 2**31


def validation_of(task: "Task") -> Any:
    """Return the target of a task's demonstrations, cut to what its model reads."""
    from whence.llm import ValidationLoss

    context = getattr(task.model.config, "max_position_embeddings", None)
    return ValidationLoss.of(task.demonstrations, task.tokenizer, max_length=context)


_HELD_OUT = 512
"""Prompts of the target held-out, where their number is not given."""


def parted(config: LanguageConfig, task: "Task") -> tuple[Any, Any | None]:
    """Return the prompts that train, and those to which the target's responses are drawn; None: to none.

    Raises:
        WhenceError: none would be left to train.
    """
    wanted = config.held_out or (_HELD_OUT if config.target == "held-out" else 0)
    if not wanted:
        return task.prompts, None
    if task.held_out is not None:
        return task.prompts, task.held_out.select(range(min(wanted, len(task.held_out))))
    if wanted >= len(task.prompts):
        raise WhenceError(
            f"held_out is {wanted}, and there are {len(task.prompts)} prompts in all; some have to be left to train."
        )
    cut = len(task.prompts) - wanted
    return task.prompts.select(range(cut)), task.prompts.select(range(cut, len(task.prompts)))


def is_finished(config: LanguageConfig, path: Path) -> bool:
    """Tell whether a directory holds this very run, with its trained model.

    Raises:
        RunDirectoryError: it holds another run.
    """
    if not (path / "config.json").exists():
        return False
    directory = RunDirectory.open(path)
    asked = described(config)
    RunDirectory(path, {name: directory.config.get(name) for name in asked}, {}).check_same(asked)
    return (path / "model").is_dir()


def curve(config: LanguageConfig, path: Path) -> Curve:
    """Read a finished run's curve of exact matches, or of test rewards, and its seconds a round.

    Seconds are the process's on a CPU, and wall time where another device computes.

    Raises:
        RunDirectoryError: the run is not finished, or was not evaluated.
    """
    if not is_finished(config, path):
        raise RunDirectoryError(f"{path} holds an unfinished run; run it again to finish it.")
    directory = RunDirectory.open(path)
    evaluations, timings = directory.table("evaluations"), directory.table("timings")
    if evaluations.is_empty():
        raise RunDirectoryError(f"{path} holds no evaluation; give a test data set, and eval_every of at least 1.")
    clock = "cpu" if directory.config.get("device", "cpu").startswith("cpu") else "wall"
    stages = [name.removesuffix(f"_{clock}") for name in timings.columns if name.endswith(f"_{clock}")]
    if config.arm.startswith("random"):  # a control that scores only to know how much to drop is not charged for it
        stages = [name for name in stages if name not in ("scoring", "held_out")]
    last = np.searchsorted(evaluations["round"].to_numpy(), np.arange(config.rounds + 1), side="right") - 1
    return Curve(
        returns=evaluations["test_return"].to_numpy()[last],
        standard_errors=evaluations["standard_error"].to_numpy()[last],
        seconds=timings.select(f"{stage}_{clock}" for stage in stages).fill_null(0.0).sum_horizontal().to_numpy(),
        evaluated=np.isin(np.arange(config.rounds + 1), evaluations["round"].to_numpy()),
    )
