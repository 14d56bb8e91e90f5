"""What a language model is trained on: a laboratory, or a model and data of the user's."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from whence.errors import WhenceError
from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.loading import check_prompts, load_data, load_function, load_model, load_pretrained
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.llm import classifier
from whence.llm.config import PPOConfig
from whence.llm.footprint import without_weights
from whence.llm.generation import generate
from whence.llm.lab import arithmetic, civility, evaluate
from whence.llm.lab.civility import answer_prompts, measure_answers
from whence.llm.prompts import list_columns, read_prompts
from whence.llm.rewards import Reward, compute_rewards, find_columns
from whence.llm.targets import ValidationLoss


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


def load_task(config: LanguageConfig, *, weights: bool = True, progress: bool = False) -> Task:
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
    model, tokenizer = load_model(str(lab.model_path), config.dtype, weights=weights)
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
    model, tokenizer = load_model(str(lab.model_path), config.dtype, weights=weights)
    judge = _judge(str(lab.reward_path), weights)
    prompts = list(lab.test["prompt"][: config.test_problems])

    def judged(model: Any, tokenizer: Any) -> Mapping[str, float]:
        found = measure_answers(lab, answer_prompts(model, tokenizer, prompts, seed=config.seed))
        civil = 1 - found["toxic"]
        return {"test_return": civil, "standard_error": math.sqrt(civil * (1 - civil) / len(prompts)), **found}

    reward = classifier(judge, tokenizer, label="neutral")
    return Task(model, tokenizer, lab.train, reward, None, lab.test, judged, lab.held_out)


def _given(config: LanguageConfig, weights: bool) -> Task:
    reward = load_function(config.reward) if config.reward else _classifier(config, weights)
    judge = load_function(config.test_reward) if config.test_reward else reward
    prompts = check_prompts(load_data(str(config.dataset)), str(config.dataset))
    shown = None if config.demonstrations is None else load_data(config.demonstrations)
    test, measured = None, None
    if config.test_dataset is not None:
        test = check_prompts(load_data(config.test_dataset), config.test_dataset)
        test = test.select(range(min(config.test_problems, len(test))))
        find_columns(judge, list_columns(test))
        measured = partial(_rewarded, make_drawing_config(config), test, judge)
    model, tokenizer = load_model(str(config.model), config.dtype, weights=weights)
    return Task(model, tokenizer, prompts, reward, shown, test, measured)


def make_drawing_config(config: LanguageConfig) -> PPOConfig:
    """Return how a run's responses are drawn, in PPO's settings, whatever trains; the test's prompts may be longer."""
    settings = make_trainer_config(config, "runs/drawn")
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
    return classifier(judge, load_pretrained(AutoTokenizer, str(config.reward_model)), label=config.reward_label)


def _judge(name: str, weights: bool) -> Any:
    judge = load_pretrained(AutoModelForSequenceClassification, name, weights=weights)
    return judge.to(_device()) if weights else judge


def _rewarded(settings: PPOConfig, test: Any, reward: Reward, model: Any, tokenizer: Any) -> Mapping[str, float]:
    """Return the mean reward of a response drawn to each prompt."""
    context = getattr(model.config, "max_position_embeddings", None)
    torch.manual_seed(settings.seed)
    prompts = read_prompts(test, tokenizer, settings, context, [reward])
    drawn = generate(model, tokenizer, prompts.ids, settings)
    rewards = compute_rewards(reward, drawn.prompts, drawn.texts, prompts.columns)
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


def make_laboratory(config: LanguageConfig) -> None:
    """Make the laboratory of a run below a bar, where it is not on disk: else each worker would."""
    if config.task == "arithmetic":
        arithmetic(size=config.size)
    elif config.task == "civility":
        civility(size=config.size)


def make_validation_target(task: Task) -> Any:
    """Return the target of a task's demonstrations, cut to what its model reads."""
    context = getattr(task.model.config, "max_position_embeddings", None)
    return ValidationLoss.of(task.demonstrations, task.tokenizer, max_length=context)


_HELD_OUT = 512
"""Prompts of the target held-out, where their number is not given."""


def split_held_out(config: LanguageConfig, task: Task) -> tuple[Any, Any | None]:
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


def scoring_memory(config: LanguageConfig) -> int | None:
    """Return the bytes that scoring may hold; None: what a training step holds. Laboratories are small."""
    return None if config.task is None else 2**31
