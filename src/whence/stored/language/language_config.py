"""Post-training runs of language models, read without Transformers: their configurations and directories."""

import importlib.util
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from whence.core import LANGUAGE_UNITS, WhenceError, suggest
from whence.engines import ENGINES
from whence.runs import RunDirectory, digest_content
from whence.validation import Count, Natural, one_of, read_table, settings

TASKS = ("arithmetic", "loophole", "smollm2")
"""Laboratories by name: two of the same small model and problems, the second with a grader that can be gamed; and a
pretrained model."""

TASK_FIELDS: Mapping[str | None, dict[str, Any]] = {"smollm2": {"size": "basic_arithmetic", "lora": 16}}
"""Fields in which the command's default for a task differs from `LanguageConfig`'s."""


@cache
def _read_task_settings() -> Mapping[str, Any]:
    return tomllib.loads((files("whence.stored.language") / "task_settings.toml").read_text(encoding="utf-8"))


def task_settings(task: str | None, size: str, algorithm: str) -> dict[str, Any]:
    """Return a task's settings of an algorithm that differ from the algorithm's defaults."""
    if task is None:
        return {}
    tasks = _read_task_settings()
    of_size = tasks["ppo" if algorithm == "ppo" else "trl"]
    sizes = tasks["puzzles"] if task == "smollm2" else [name for name in of_size if name not in TASKS]
    if size not in sizes:
        raise WhenceError(f"The task {task} has no size {size!r}.{suggest(size, sizes)}")
    return {**of_size[task if task == "smollm2" else size], **({"beta": 0.0} if algorithm == "rloo" else {})}


@settings("A run")
class LanguageConfig:
    """One post-training run; its results depend on nothing else.

    The trainer's settings are checked by `make_trainer_config`, so that reading a configuration needs neither
    Transformers nor TRL.

    Attributes:
        arm: the name of how responses were selected; see `whence list arms`. A target may follow: "iif-token".
        seed: seed of all random draws.
        task: a laboratory that makes its own small model and problems; None: the next eight fields say what trains.
        model: directory or id of a causal language model of Transformers.
        dataset: directory or id of a data set with the column "prompt".
        reward: a function of (prompts, responses) that returns numbers, as file.py:name or module:name; further
            arguments get the data set's columns of their names.
        reward_model: instead of `reward`, directory or id of a sequence classifier, whose logit is the reward.
        reward_label: the classifier's label whose logit is the reward; None: its only label.
        demonstrations: directory or id of a data set with "prompt" and "completion", for the target "validation".
        test_dataset: directory or id of a data set whose prompts measure the trained model; None: no measurement.
        test_reward: a function, as `reward`, that measures the model; None: the reward.
        size: size of the task's laboratory: small, weak (for the loophole), or tiny for a look; of smollm2 the puzzle:
            chain_sum, basic_arithmetic or letter_counting.
        dtype: type of the model's parameters: float32 or bfloat16.
        lora: rank of an adapter that trains instead of the model; 0: the model trains.
        held_out: number of prompts for the target's responses, which do not train; 0: the target is over the scored
            rows.
        test_problems: number of the test's prompts in an evaluation.
        samples: sampled answers to each of them, next to the greedy one.
        unit: what is kept or dropped as one, by its responses' mean score: row or group, all responses to a prompt;
            None: row.
        engine: how scores are computed; see `whence list engines`.
        select: when responses are chosen: in_step or before the steps; None: in the step where that can be.
        algorithm: what trains: ppo (whence's own), grpo or rloo (TRL's).
        settings: settings that differ from the task's: of `PPOConfig`, or of TRL's GRPOConfig or RLOOConfig with
            `rounds` and `eval_every`.
    """

    arm: str
    seed: Natural
    task: Annotated[str, one_of(TASKS)] | None = "arithmetic"
    model: str | None = None
    dataset: str | None = None
    reward: str | None = None
    reward_model: str | None = None
    reward_label: str | None = None
    demonstrations: str | None = None
    test_dataset: str | None = None
    test_reward: str | None = None
    size: str = "small"
    dtype: Annotated[str, one_of(("float32", "bfloat16"))] = "float32"
    lora: Natural = 0
    held_out: Natural = 0
    test_problems: Count = 512
    samples: Count = 4
    unit: Annotated[str, one_of(LANGUAGE_UNITS)] | None = None
    engine: Annotated[str, one_of(("auto", *ENGINES))] = "auto"
    select: Literal["in_step", "before"] | None = None
    algorithm: Annotated[str, one_of(("ppo", "grpo", "rloo"))] = "ppo"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, least in (("rounds", self.rounds, 1), ("eval_every", self.eval_every, 0)):
            if type(value) is not int or value < least:
                raise WhenceError(f"{name} is {value!r}; a whole number, at least {least}, is needed.")
        sources = [name for name in SOURCE if getattr(self, name) is not None]
        missing = [name for name in ("model", "dataset") if name not in sources]
        missing += [] if {"reward", "reward_model"} & set(sources) else ["reward"]
        reserved = sorted(self.settings.keys() & {"output_dir", "seed", "max_steps"})
        refusals = [
            (
                self.dtype == "bfloat16" and not self.lora,
                "bfloat16 is too coarse to train in: train an adapter (--lora).",
            ),
            (self.task and sources, f"{', '.join(sources)} and a task were both given: set task=None, or drop --task."),
            (
                not self.task and missing,
                f"Neither a task nor {', '.join(missing)} was given. Give --task, or all of them.",
            ),
            (self.reward and self.reward_model, "reward and reward_model are given: a function can call the model."),
            (self.reward_label and not self.reward_model, "reward_label is given, and no reward_model with labels."),
            (self.test_reward and not self.test_dataset, "test_reward is given, and no test_dataset to measure on."),
            (self.held_out and self.algorithm != "ppo", "held_out is an option of PPO; leave it out with TRL."),
            (reserved, f"A run's settings have no setting {', '.join(reserved)}: the run itself says it."),
        ]
        if reason := next((reason for is_wrong, reason in refusals if is_wrong), None):
            raise WhenceError(reason)

    @property
    def env(self) -> str:
        """The task or the model, for headings."""
        return f"smollm2-{self.size}" if self.task == "smollm2" else self.task or str(self.model)

    @property
    def has_small_model(self) -> bool:
        """Whether the task makes its own small model."""
        return self.task not in (None, "smollm2")

    @property
    def rounds(self) -> int:
        """Rollouts to train on."""
        rounds: int = self.all_settings.get("rounds", 100)
        return rounds

    @property
    def eval_every(self) -> int:
        """Rounds between evaluations; 0: no evaluations."""
        eval_every: int = self.all_settings.get("eval_every", 1)
        return eval_every

    @property
    def all_settings(self) -> dict[str, Any]:
        """The task's settings, updated by the run's."""
        return {**task_settings(self.task, self.size, self.algorithm), **self.settings}

    @property
    def responses_per_prompt(self) -> int:
        """Responses to one prompt in a round."""
        default = {"ppo": 1, "grpo": 8, "rloo": 2}[self.algorithm]  # TRL's
        return self.all_settings.get("num_generations") or default

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_json` returned.

        Raises:
            WhenceError: a field is missing, unknown, or has a value that no run has.
        """
        if isinstance(values, Mapping):  # older runs say by which layers they were scored
            values = {name: value for name, value in values.items() if name != "layers"}
        return read_table(cls, "A run", values)


SOURCE = (
    *("model", "dataset", "reward", "reward_model", "reward_label"),
    *("demonstrations", "test_dataset", "test_reward"),
)
"""The fields for a user's model and data."""


def knows_policies(run: RunDirectory) -> bool:
    """Return whether a run's configuration says where its policies are: of any training by whence's trainers."""
    return bool(run.is_language and (run.experiment or "ppo" in run.config or "output_dir" in run.config))


@contextmanager
def search_first(folder: Path) -> Iterator[None]:
    """Look for modules in a folder first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def describe(config: LanguageConfig) -> dict[str, Any]:
    """Return the description of a run for its directory, in JSON types, with digests of what its names point at."""
    contents = digest_sources({name: getattr(config, name) for name in SOURCE if name != "reward_label"})
    return {"arm": config.arm, "env": config.env, "experiment": config.to_json(), "contents": contents}


def digest_sources(names: Mapping[str, str | None]) -> dict[str, str]:
    """Return digests of what names point at on this machine: of the contents, by which a change is seen."""
    digests = {what: digest_source(name) for what, name in names.items()}
    return {what: digest for what, digest in digests.items() if digest is not None}


def digest_source(name: str | None) -> str | None:
    """Return a digest of a file or folder, or of the file of a function, see `load_function`; None: there is none.

    Of a function it is the one file; those that it imports may change unnoticed.
    """
    if name is None or (digest := digest_content(Path(name))) is not None:
        return None if name is None else digest
    source, _, _ = name.rpartition(":")
    path = Path(source)
    if source and not source.endswith(".py"):
        try:
            with search_first(Path.cwd()):
                spec = importlib.util.find_spec(source)
        except Exception:  # A parent package cannot be imported, which loading the function will report.
            return None
        path = Path("" if spec is None or spec.origin is None else spec.origin)
    return digest_content(path) if path.is_file() else None
