"""What a language model is trained on: a laboratory, or a model and data of the user's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from whence.errors import WhenceError, nearest
from whence.experiments.language import LanguageConfig
from whence.llm import classifier
from whence.llm.config import PPOConfig
from whence.llm.generation import generate, tokenized
from whence.llm.lab import SIZES, arithmetic, civility, evaluate
from whence.llm.lab.civility import LONGEST, answered, measured
from whence.llm.rewards import Reward, checked

SETTINGS: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
    {
        ("arithmetic", "small"): {
            "rounds": 40,
            "batch_size": 256,
            "mini_batch_size": 64,
            "ppo_epochs": 4,
            "learning_rate": 5e-5,
            "value_learning_rate": 1e-2,
            "init_kl_coef": 0.0,
            "adap_kl_ctrl": False,
            "generation_batch_size": 256,
            "eval_every": 4,
        },
        ("arithmetic", "tiny"): {
            "rounds": 3,
            "batch_size": 32,
            "mini_batch_size": 16,
            "ppo_epochs": 2,
            "learning_rate": 1e-3,
            "init_kl_coef": 0.0,
            "adap_kl_ctrl": False,
        },
        ("arithmetic", "large"): {
            "rounds": 100,
            "batch_size": 1024,
            "mini_batch_size": 128,
            "ppo_epochs": 4,
            "learning_rate": 1e-5,
            "value_learning_rate": 1e-3,
            "init_kl_coef": 0.0,
            "adap_kl_ctrl": False,
            "generation_batch_size": 1024,
            "eval_every": 5,
        },
        # LDA's, in small (§C.8): its coefficient of the divergence, and how it is steered.
        ("civility", "small"): {
            "rounds": 30,
            "batch_size": 256,
            "mini_batch_size": 64,
            "ppo_epochs": 4,
            "learning_rate": 5e-5,
            "value_learning_rate": 1e-2,
            "init_kl_coef": 0.04,
            "target": 0.1,
            "generation_batch_size": 256,
            "eval_every": 2,
        },
        ("civility", "tiny"): {
            "rounds": 2,
            "batch_size": 16,
            "mini_batch_size": 8,
            "ppo_epochs": 1,
            "learning_rate": 1e-3,
        },
    }
)
"""PPO's settings for a task and its size, where they are not `PPOConfig`'s own."""


def ppo_of(task: str | None, size: str) -> dict[str, Any]:
    """Return PPO's settings for a task, where they are not `PPOConfig`'s own.

    Raises:
        WhenceError: the task has no such size.
    """
    if task is None:
        return {}
    _check_size(task, size)
    return {"max_new_tokens": _room(task, size), **SETTINGS[task, size]}


def _check_size(task: str, size: str) -> None:
    sizes = [known for of, known in SETTINGS if of == task]
    if size not in sizes:
        raise WhenceError(f"The task {task} has no size {size!r}.{nearest(size, sizes)}")


def _room(task: str, size: str) -> int:
    """Return the tokens of the longest response that a task needs."""
    return SIZES[size].difficulty.longest + 1 if task == "arithmetic" else LONGEST


def group_settings_of(task: str | None, size: str, algorithm: str) -> dict[str, Any]:
    """Return GRPO's or RLOO's settings for a task, by TRL's names, and `rounds` and `eval_every`."""
    if task is None:
        return {}
    _check_size(task, size)
    found = {"max_completion_length": _room(task, size), **_GROUPS[task, size]}
    return found | ({"beta": 0.0} if algorithm == "rloo" else {})


_GROUPS: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
    {
        ("arithmetic", "small"): {
            "rounds": 40,
            "eval_every": 4,
            "per_device_train_batch_size": 64,
            "gradient_accumulation_steps": 4,
            "num_generations": 8,
            "num_iterations": 4,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
        },
        ("arithmetic", "tiny"): {
            "rounds": 3,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "learning_rate": 1e-3,
        },
        ("arithmetic", "large"): {
            "rounds": 100,
            "eval_every": 5,
            "per_device_train_batch_size": 128,
            "gradient_accumulation_steps": 8,
            "num_generations": 8,
            "num_iterations": 4,
            "learning_rate": 1e-5,
            "lr_scheduler_type": "constant",
        },
        ("civility", "small"): {
            "rounds": 30,
            "eval_every": 2,
            "per_device_train_batch_size": 64,
            "gradient_accumulation_steps": 4,
            "num_generations": 8,
            "num_iterations": 4,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
        },
        ("civility", "tiny"): {
            "rounds": 2,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "learning_rate": 1e-3,
        },
    }
)


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained, on what, for what.

    Attributes:
        model: a causal language model.
        tokenizer: its own.
        prompts: to train on.
        reward: of prompts and responses.
        demonstrations: trusted answers, with "prompt" and "completion"; None: there are none.
        evaluate: measures the model, with at least `test_return` and `standard_error`; None: it is not measured.
        held_out: prompts that do not train, for the target held-out; none: some of `prompts` are set aside.
    """

    model: Any
    tokenizer: Any
    prompts: Sequence[Any]
    reward: Reward
    demonstrations: Any | None
    evaluate: Callable[[Any, Any], Mapping[str, float]] | None
    held_out: Sequence[Any] = ()


def task_of(config: LanguageConfig, *, progress: bool = False) -> Task:
    """Return what a run trains; a laboratory that is not on disk is made.

    Raises:
        WhenceError: a model or data set that cannot be loaded.
    """
    made = {"arithmetic": _arithmetic, "civility": _civility}
    task = made[config.task](config, progress) if config.task is not None else _given(config)
    return Task(**{**vars(task), "model": _adapted(task.model, config)}) if config.lora else task


def _arithmetic(config: LanguageConfig, progress: bool) -> Task:
    lab = arithmetic(size=config.size, progress=progress)
    model, tokenizer = _model(str(lab.model_path), config.dtype)
    problems = list(lab.test["prompt"][: config.test_problems])

    def measured(model: Any, tokenizer: Any) -> Mapping[str, float]:
        found = evaluate(
            *(model, tokenizer, problems),
            samples=config.samples,
            seed=config.seed,
            max_new_tokens=lab.max_new_tokens,
            batch_size=256,
        )
        share = found["exact_match"]
        return {"test_return": share, "standard_error": math.sqrt(share * (1 - share) / len(problems)), **found}

    return Task(model, tokenizer, list(lab.train["prompt"]), lab.reward, lab.demonstrations, measured)


def _civility(config: LanguageConfig, progress: bool) -> Task:
    lab = civility(size=config.size, progress=progress)
    model, tokenizer = _model(str(lab.model_path), config.dtype)
    judge = _loaded(AutoModelForSequenceClassification, str(lab.reward_path)).to(_device())
    prompts = list(lab.test["prompt"][: config.test_problems])

    def judged(model: Any, tokenizer: Any) -> Mapping[str, float]:
        found = measured(lab, answered(model, tokenizer, prompts, seed=config.seed))
        civil = 1 - found["toxic"]
        return {"test_return": civil, "standard_error": math.sqrt(civil * (1 - civil) / len(prompts)), **found}

    reward = classifier(judge, tokenizer, label="neutral")
    return Task(model, tokenizer, list(lab.train["prompt"]), reward, None, judged, list(lab.held_out["prompt"]))


def _given(config: LanguageConfig) -> Task:
    model, tokenizer = _model(str(config.model), config.dtype)
    judge = _loaded(AutoModelForSequenceClassification, str(config.reward_model)).to(_device())
    reads = _loaded(AutoTokenizer, str(config.reward_model))
    reward = classifier(judge, reads, label=config.reward_label)
    shown = None if config.demonstrations is None else _dataset(config.demonstrations)
    measured = None
    if config.test_dataset is not None:
        test = list(_prompts(_dataset(config.test_dataset), config.test_dataset))[: config.test_problems]
        how: Any = {"seed": config.seed, "temperature": float(config.settings.get("temperature", 1.0))}
        measured = partial(_rewarded, PPOConfig("runs/test", max_new_tokens=_longest(config), **how), test, reward)
    prompts = _prompts(_dataset(str(config.dataset)), str(config.dataset))
    return Task(model, tokenizer, list(prompts), reward, shown, measured)


def _rewarded(
    settings: PPOConfig, prompts: Sequence[Any], reward: Reward, model: Any, tokenizer: Any
) -> Mapping[str, float]:
    """Return the mean reward of a response drawn to each prompt."""
    context = getattr(model.config, "max_position_embeddings", None)
    torch.manual_seed(settings.seed)
    drawn = generate(model, tokenizer, tokenized(tokenizer, prompts, settings, context), settings)
    rewards = checked(reward, drawn.prompts, drawn.texts)
    error = float(rewards.std()) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return {"test_return": float(rewards.mean()), "standard_error": error}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _longest(config: LanguageConfig) -> int:
    given = config.settings
    return int(given.get("max_new_tokens", given.get("max_completion_length", PPOConfig.max_new_tokens)))


def _prompts(dataset: Any, name: str) -> Sequence[Any]:
    if "prompt" not in dataset.column_names:
        raise WhenceError(
            f"The data set {name} has the columns {', '.join(dataset.column_names)}; a column 'prompt' is needed."
        )
    return dataset["prompt"]  # type: ignore[no-any-return]


def _dataset(name: str) -> Any:
    """Return a data set of a directory, a file of JSON lines, or an id, and of several splits the one to train on."""
    try:
        if (Path(name).is_dir() and any(Path(name).glob("*.arrow"))) or (Path(name) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(name)
        elif Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet"):
            kind = {".jsonl": "json"}.get(Path(name).suffix, Path(name).suffix[1:])
            found = datasets.load_dataset(kind, data_files=name)
        else:
            found = datasets.load_dataset(name)
    except Exception as wrong:
        raise WhenceError(f"The data set {name} cannot be loaded: {_first_line(wrong)}") from wrong
    return found["train" if "train" in found else next(iter(found))] if isinstance(found, dict) else found


def _model(name: str, dtype: str) -> tuple[Any, Any]:
    return _loaded(AutoModelForCausalLM, name, dtype=getattr(torch, dtype)), _loaded(AutoTokenizer, name)


def _loaded(kind: Any, name: str, **how: Any) -> Any:
    try:
        return kind.from_pretrained(name, **how)
    except Exception as wrong:
        what = "tokenizer" if kind is AutoTokenizer else "model"
        raise WhenceError(f"The {what} {name} cannot be loaded: {_first_line(wrong)}") from wrong


def _first_line(wrong: Exception) -> str:
    return (str(wrong) or type(wrong).__name__).splitlines()[0]


def _adapted(model: Any, config: LanguageConfig) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(
        r=config.lora,
        lora_alpha=2 * config.lora,
        lora_dropout=0.0,
        task_type=TaskType.CAUSAL_LM,
        target_modules="all-linear",
    )
    return get_peft_model(model, settings)
