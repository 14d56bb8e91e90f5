"""What a language model is trained on: a laboratory, or a model and data of the user's."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from whence.errors import WhenceError, nearest
from whence.experiments.language import LanguageConfig
from whence.experiments.loading import dataset_of, function_of, loaded, model_of, prompts_in
from whence.llm import classifier
from whence.llm.config import PPOConfig
from whence.llm.footprint import without_weights
from whence.llm.generation import generate
from whence.llm.lab import SIZES, arithmetic, civility, evaluate
from whence.llm.lab.civility import LONGEST, answered, measured
from whence.llm.prompts import columns_of, prompts_of
from whence.llm.rewards import Reward, asked_for, checked

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
        prompts: to train on: a data set with the column "prompt", and others that the reward may ask for.
        reward: of prompts and responses.
        demonstrations: trusted answers, with "prompt" and "completion"; None: there are none.
        test: prompts that it is measured on, as `prompts`; None: it is not.
        evaluate: measures the model, with at least `test_return` and `standard_error`; None: it is not measured.
        held_out: as `prompts`, none of which trains, for the target held-out; None: some of `prompts` are set aside.
    """

    model: Any
    tokenizer: Any
    prompts: Any
    reward: Reward
    demonstrations: Any | None
    test: Any | None
    evaluate: Callable[[Any, Any], Mapping[str, float]] | None
    held_out: Any | None = None


def task_of(config: LanguageConfig, *, weights: bool = True, progress: bool = False) -> Task:
    """Return what a run trains; a laboratory that is not on disk is made.

    Args:
        config: of the run.
        weights: False: models have shapes alone, which is enough to look at what a run would take.
        progress: show bars while a laboratory is made.

    Raises:
        WhenceError: a model or data set that cannot be loaded.
    """
    made = {"arithmetic": _arithmetic, "civility": _civility}
    task = made[config.task](config, weights, progress) if config.task is not None else _given(config, weights)
    if not config.lora:
        return task
    with nullcontext() if weights else without_weights():
        return replace(task, model=_adapted(task.model, config))


def _arithmetic(config: LanguageConfig, weights: bool, progress: bool) -> Task:
    lab = arithmetic(size=config.size, progress=progress)
    model, tokenizer = model_of(str(lab.model_path), config.dtype, weights=weights)
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

    return Task(model, tokenizer, lab.train, lab.reward, lab.demonstrations, lab.test, measured)


def _civility(config: LanguageConfig, weights: bool, progress: bool) -> Task:
    lab = civility(size=config.size, progress=progress)
    model, tokenizer = model_of(str(lab.model_path), config.dtype, weights=weights)
    judge = _judge(str(lab.reward_path), weights)
    prompts = list(lab.test["prompt"][: config.test_problems])

    def judged(model: Any, tokenizer: Any) -> Mapping[str, float]:
        found = measured(lab, answered(model, tokenizer, prompts, seed=config.seed))
        civil = 1 - found["toxic"]
        return {"test_return": civil, "standard_error": math.sqrt(civil * (1 - civil) / len(prompts)), **found}

    reward = classifier(judge, tokenizer, label="neutral")
    return Task(model, tokenizer, lab.train, reward, None, lab.test, judged, lab.held_out)


def _given(config: LanguageConfig, weights: bool) -> Task:
    reward = function_of(config.reward) if config.reward else _classifier(config, weights)
    judge = function_of(config.test_reward) if config.test_reward else reward
    prompts = prompts_in(dataset_of(str(config.dataset)), str(config.dataset))
    shown = None if config.demonstrations is None else dataset_of(config.demonstrations)
    test, measured = None, None
    if config.test_dataset is not None:
        test = prompts_in(dataset_of(config.test_dataset), config.test_dataset)
        test = test.select(range(min(config.test_problems, len(test))))
        asked_for(judge, columns_of(test))
        measured = partial(_rewarded, drawing_of(config), test, judge)
    model, tokenizer = model_of(str(config.model), config.dtype, weights=weights)
    return Task(model, tokenizer, prompts, reward, shown, test, measured)


def drawing_of(config: LanguageConfig) -> PPOConfig:
    """Return how a run's responses are drawn, in PPO's settings, whatever trains; the test's prompts may be longer."""
    settings = config.trained_by("runs/drawn")
    if isinstance(settings, PPOConfig):
        return replace(settings, max_prompt_length=None)
    return PPOConfig(
        "runs/drawn",
        max_new_tokens=settings.max_completion_length,
        generation_batch_size=settings.per_device_train_batch_size,
        temperature=settings.temperature,
        top_k=settings.top_k or 0,
        top_p=settings.top_p,
        seed=config.seed,
    )


def _classifier(config: LanguageConfig, weights: bool) -> Reward:
    judge = _judge(str(config.reward_model), weights)
    return classifier(judge, loaded(AutoTokenizer, str(config.reward_model)), label=config.reward_label)


def _judge(name: str, weights: bool) -> Any:
    judge = loaded(AutoModelForSequenceClassification, name, weights=weights)
    return judge.to(_device()) if weights else judge


def _rewarded(settings: PPOConfig, test: Any, reward: Reward, model: Any, tokenizer: Any) -> Mapping[str, float]:
    """Return the mean reward of a response drawn to each prompt."""
    context = getattr(model.config, "max_position_embeddings", None)
    torch.manual_seed(settings.seed)
    prompts = prompts_of(test, tokenizer, settings, context, [reward])
    drawn = generate(model, tokenizer, prompts.ids, settings)
    rewards = checked(reward, drawn.prompts, drawn.texts, prompts.columns)
    error = float(rewards.std()) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return {"test_return": float(rewards.mean()), "standard_error": error}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
