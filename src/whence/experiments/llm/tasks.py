"""Tasks of language-model runs: the laboratory, or a user's model and data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from whence.errors import WhenceError
from whence.experiments.llm.language_config import LanguageConfig
from whence.experiments.llm.loading import (
    check_prompts,
    ignore_old_names,
    load_data,
    load_function,
    load_model,
    load_pretrained,
)
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.llm import classifier
from whence.llm.base.ppo_config import PPOConfig
from whence.llm.lab import arithmetic, evaluate
from whence.llm.scores.language_targets import ValidationLoss
from whence.llm.text.generation import generate
from whence.llm.text.prompts import Prompt, context_length, list_columns, read_prompts
from whence.llm.text.rewards import Reward, compute_rewards, find_columns


@dataclass(frozen=True, eq=False)
class Task:
    """A model, its prompts and its reward.

    Attributes:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompts: a data set with the column "prompt", and others that the reward may ask for.
        reward: the reward function.
        demonstrations: trusted answers, with the columns "prompt" and "completion"; None: there are none.
        test: a data set of prompts that measure the model; None: there is none.
        evaluate: measures the model and returns at least `test_return` and `standard_error`; None: no measurement.
    """

    model: Any
    tokenizer: Any
    prompts: Any
    reward: Reward
    demonstrations: Any | None
    test: Any | None
    evaluate: Callable[[Any, Any], Mapping[str, float]] | None


def load_task(config: LanguageConfig, *, rewards: bool = True) -> Task:
    """Return the task of a run; a laboratory that is not on disk is made.

    Args:
        config: the run's configuration.
        rewards: False loads no reward of the user's, and runs no code that the configuration names: a task to look at.

    Raises:
        WhenceError: a model, data set or function cannot be loaded.
    """
    task = _load_arithmetic(config) if config.task == "arithmetic" else _load_user_task(config, rewards)
    return replace(task, model=_add_adapter(task.model, config)) if config.lora else task


def _load_arithmetic(config: LanguageConfig) -> Task:
    lab = arithmetic(size=config.size, progress=False)
    model, tokenizer = load_model(str(lab.model_path), config.dtype)
    problems = list(lab.test["prompt"][: config.test_problems])

    def evaluate_model(model: Any, tokenizer: Any) -> Mapping[str, float]:
        measures = evaluate(
            model,
            tokenizer,
            problems,
            samples=config.samples,
            seed=config.seed,
            max_new_tokens=lab.max_new_tokens,
            batch_size=256,
        )
        share = measures["exact_match"]
        error = math.sqrt(share * (1 - share) / len(problems))
        return {"test_return": share, "standard_error": error, **measures}

    return Task(model, tokenizer, lab.train, lab.reward, lab.demonstrations, lab.test, evaluate_model)


def _load_user_task(config: LanguageConfig, rewards: bool) -> Task:
    """Return a task of the user's; without rewards, its reward refuses to be called, and there is no test."""
    prompts = check_prompts(load_data(str(config.dataset)), str(config.dataset))
    demonstrations = None if config.demonstrations is None else load_data(config.demonstrations)
    reward: Reward = _refuse_reward
    test, evaluate_model = None, None
    if rewards:
        reward = load_function(config.reward) if config.reward else _load_reward_model(config)
    if rewards and config.test_dataset is not None:
        test_reward = load_function(config.test_reward) if config.test_reward else reward
        test = check_prompts(load_data(config.test_dataset), config.test_dataset)
        test = test.select(range(min(config.test_problems, len(test))))
        find_columns(test_reward, list_columns(test))
        evaluate_model = partial(_measure_reward, make_sampling_config(config), test, test_reward)
    model, tokenizer = load_model(str(config.model), config.dtype)
    return Task(model, tokenizer, prompts, reward, demonstrations, test, evaluate_model)


def _refuse_reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    raise WhenceError("A stored run's reward is not loaded: reading a run runs no code that the run names.")


def make_sampling_config(config: LanguageConfig) -> PPOConfig:
    """Return the sampling settings of a run with any algorithm as a `PPOConfig`; prompts may have any length."""
    settings = make_trainer_config(config, "runs/sampled")
    if isinstance(settings, PPOConfig):
        return replace(settings, max_prompt_length=None)
    return PPOConfig(
        "runs/sampled",
        max_new_tokens=settings.max_completion_length,
        generation_batch_size=settings.per_device_train_batch_size,
        temperature=settings.temperature,
        top_k=settings.top_k or 0,
        top_p=settings.top_p,
        seed=config.seed,
    )


def check_lengths(config: LanguageConfig, task: Task) -> None:
    """Refuse prompts of a TRL run that leave no room for their completions; PPO's trainer checks its own.

    Raises:
        WhenceError: see `tokenize_prompts`.
    """
    longest = make_trainer_config(config, "runs/checked").max_completion_length
    if longest is not None:
        limits, context = PPOConfig("runs/checked", max_new_tokens=longest), context_length(task.model)
        read_prompts(task.prompts, task.tokenizer, limits, context, [task.reward], "max_completion_length")


def _load_reward_model(config: LanguageConfig) -> Reward:
    name = str(config.reward_model)
    model = load_pretrained(AutoModelForSequenceClassification, name)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return classifier(model, load_pretrained(AutoTokenizer, name), label=config.reward_label)


def _measure_reward(settings: PPOConfig, test: Any, reward: Reward, model: Any, tokenizer: Any) -> Mapping[str, float]:
    """Return the mean reward of responses, one to each prompt of the test."""
    torch.manual_seed(settings.seed)
    prompts = read_prompts(test, tokenizer, settings, context_length(model), [reward])
    responses = generate(model, tokenizer, prompts.ids, settings)
    rewards = compute_rewards(reward, responses.prompts, responses.texts, prompts.columns)
    error = float(rewards.std()) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return {"test_return": float(rewards.mean()), "standard_error": error}


def _add_adapter(model: Any, config: LanguageConfig) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    settings = LoraConfig(
        r=config.lora,
        lora_alpha=2 * config.lora,
        lora_dropout=0.0,
        task_type=TaskType.CAUSAL_LM,
        target_modules="all-linear",
    )
    with ignore_old_names():
        return get_peft_model(model, settings)


def make_validation_target(task: Task) -> Any:
    """Return the target of a task's demonstrations, cut to the model's context."""
    return ValidationLoss.of(task.demonstrations, task.tokenizer, max_length=context_length(task.model))


def make_response_target(task: Task, prompt: Prompt, response: str) -> ValidationLoss:
    """Return the mean log-probability of a response's tokens after a prompt, its end-of-text token included.

    Args:
        task: a run's task. Where its prompts are chats, a text is asked as a chat of one message.
        prompt: a text, or the messages of a chat.
        response: a text.

    Raises:
        WhenceError: the tokenizer does not know a character, the prompt has no token, or the model's context is too
            short.
    """
    is_chat = not isinstance(prompt, str) or not isinstance(next(iter(task.prompts))["prompt"], str)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    row = {"prompt": messages if is_chat else prompt, "completion": response}
    if is_chat:
        row["completion"] = [{"role": "assistant", "content": response}]
    if not is_chat and not task.tokenizer(prompt)["input_ids"]:
        raise WhenceError(f"The prompt {prompt!r} has no token, and a response follows one at least. Write a prompt.")
    target = ValidationLoss.of([row], task.tokenizer)
    assert target.rows is not None
    ids = target.rows.observations["input_ids"][0].tolist()
    unknown = task.tokenizer.unk_token_id
    if unknown in ids and unknown != task.tokenizer.eos_token_id:
        raise WhenceError(
            "The run's tokenizer does not know all characters: it reads prompt and response as "
            f"{task.tokenizer.decode(ids)!r}. Ask with the characters of the run's prompts and responses."
        )
    context = context_length(task.model)
    if context is not None and len(ids) > context:
        raise WhenceError(
            f"Prompt and response have {len(ids)} tokens, and the model reads at most {context}. Ask with shorter ones."
        )
    return target


_HELD_OUT = 512
"""Default number of prompts of the target held-out."""


def split_held_out(config: LanguageConfig, task: Task) -> tuple[Any, Any | None]:
    """Return the prompts that train, and those of the target's responses; None: the target needs none.

    Raises:
        WhenceError: no prompt would be left to train.
    """
    count = config.held_out or (_HELD_OUT if config.target == "held-out" else 0)
    if not count:
        return task.prompts, None
    if count >= len(task.prompts):
        raise WhenceError(
            f"held_out is {count}, and there are {len(task.prompts)} prompts in all; at least one has to train."
        )
    cut = len(task.prompts) - count
    return task.prompts.select(range(cut)), task.prompts.select(range(cut, len(task.prompts)))


_SAMPLE = 16
"""Prompts that are answered at each evaluation."""


def choose_sample_prompts(task: Task) -> Any:
    """Return the prompts whose answers are stored: the first of the test, or of the training if there is no test.

    The reward has to find its columns there, too; the test of a user has those that its own reward asks for.
    """
    source = task.prompts
    if task.test is not None and set(find_columns(task.reward, list_columns(task.prompts))) <= set(
        list_columns(task.test)
    ):
        source = task.test
    return source.select(range(min(_SAMPLE, len(source))))


def scoring_memory(config: LanguageConfig) -> int | None:
    """Return the bytes that scoring may hold: ample for small laboratories; None, those of a pass, for other models."""
    return None if config.task is None or config.size == "large" else 2**31
