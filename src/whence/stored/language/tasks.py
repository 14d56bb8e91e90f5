"""Tasks of language-model runs: the laboratory, or a user's model, data and functions, and the trainer's settings."""

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from whence.core import Target, WhenceError, first_line, load_plugin, suggest
from whence.llm.base import PPOConfig, add_adapter, check_kernels, choose_loader, has_adapter, list_tokens, load_adapter
from whence.llm.scores import RESPONSE_TARGETS, ValidationLoss
from whence.llm.text import (
    Evaluate,
    Prompt,
    Reward,
    classifier,
    compute_rewards,
    context_length,
    find_columns,
    generate,
    list_columns,
    read_prompts,
)
from whence.stored.language.language_config import LanguageConfig, search_first


def make_trainer_config(config: LanguageConfig, output_dir: str = "runs/checked") -> Any:
    """Return the `PPOConfig`, or TRL's GRPOConfig or RLOOConfig, of a run; a setting out of its range is refused."""
    settings = {**config.all_settings, "seed": config.seed}
    if config.algorithm == "ppo":
        return PPOConfig(output_dir, **{"disable_tqdm": True, **settings})  # commands show their own progress bar
    return _make_trl_config(config, output_dir, settings)


def _make_trl_config(config: LanguageConfig, output_dir: str, settings: dict[str, Any]) -> Any:
    import trl  # takes seconds

    kind = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[config.algorithm]
    settings = {name: value for name, value in settings.items() if name not in ("rounds", "eval_every")}
    on_gpu = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        **{"report_to": [], "disable_tqdm": True, "logging_strategy": "no"},
        **{"bf16": False, "use_cpu": not on_gpu, "dataloader_pin_memory": on_gpu},
    }
    if not {"save_strategy", "save_steps"} & settings.keys():
        defaults |= {"save_strategy": "no", "save_total_limit": 2}  # the run itself says when checkpoints are due
    # Under the name that this version of Transformers has; TRL's default is the older name, which gives a warning.
    names = ("activation_checkpointing", "gradient_checkpointing")
    if not set(names) & settings.keys():
        checkpointing = next(name for name in names if name in kind.__dataclass_fields__)
        defaults[checkpointing] = config.task is None  # laboratories are small
    steps = config.rounds * settings.get("num_iterations", 1)
    try:
        trainer_config = kind(output_dir, **{**defaults, **settings, "max_steps": steps})
    except (TypeError, ValueError) as error:
        raise WhenceError(f"TRL refuses these settings: {error}") from error
    if trainer_config.steps_per_generation != trainer_config.gradient_accumulation_steps:
        raise WhenceError(
            "A round is one step on a generation batch: steps_per_generation has to equal gradient_accumulation_steps "
            "(num_iterations may be more than 1)."
        )
    return trainer_config


def make_sampling_config(config: LanguageConfig) -> PPOConfig:
    """Return the sampling settings of a run with any algorithm as a `PPOConfig`; prompts may have any length."""
    settings = make_trainer_config(config)
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
    evaluate: Evaluate | None


def load_task(config: LanguageConfig, *, rewards: bool = True) -> Task:
    """Return the task of a run; a laboratory that is not on disk is made.

    Without `rewards` it is a task to look at: no reward of the user's is loaded, and no code that it names runs.
    """
    task = _load_laboratory(config) if config.task else _load_user_task(config, rewards)
    return replace(task, model=add_adapter(task.model, config.lora)) if config.lora else task


def _load_laboratory(config: LanguageConfig) -> Task:
    """Return the task of a laboratory, a plug-in: opening a run imports nothing that makes models and data."""
    try:
        load: Callable[[LanguageConfig], Task] | None = load_plugin("whence.tasks", str(config.task))
    except ImportError:
        load = None
    if load is None:
        raise WhenceError(f"The task {config.task!r} is of the laboratory, whence.lab, which is not installed.")
    return load(config)


def _load_user_task(config: LanguageConfig, rewards: bool) -> Task:
    """Return a task of the user's; without rewards, its reward refuses to be called, and there is no test."""
    prompts = load_data(str(config.dataset))
    demonstrations = None if config.demonstrations is None else load_data(config.demonstrations)
    reward: Reward = refuse_reward
    test, evaluate_model = None, None
    if rewards:
        reward = load_function(config.reward) if config.reward else _load_reward_model(config)
    if rewards and config.test_dataset is not None:
        test_reward = load_function(config.test_reward) if config.test_reward else reward
        test, evaluate_model = prepare_test(config, load_data(config.test_dataset), test_reward)
    model, tokenizer = load_language_model(str(config.model), config.dtype)
    return Task(model, tokenizer, prompts, reward, demonstrations, test, evaluate_model)


def prepare_test(config: LanguageConfig, test: Any, reward: Reward) -> tuple[Any, Evaluate]:
    """Return the prompts that measure the model, and what measures it by them."""
    test = test.select(range(min(config.test_problems, len(test))))
    find_columns(reward, list_columns(test))
    return test, partial(_measure_reward, make_sampling_config(config), test, reward)


def refuse_reward(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Stand for the reward of a task that is looked at."""
    raise WhenceError("A stored run's reward is not loaded: reading a run runs no code that the run names.")


def _load_reward_model(config: LanguageConfig) -> Reward:
    name = str(config.reward_model)
    model = load_pretrained(AutoModelForSequenceClassification, name)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return classifier(model, load_pretrained(AutoTokenizer, name), label=config.reward_label)


def _measure_reward(settings: PPOConfig, test: Any, reward: Reward, model: Any, tokenizer: Any) -> dict[str, float]:
    """Return the mean reward of responses, one to each prompt of the test."""
    torch.manual_seed(settings.seed)
    prompts = read_prompts(test, tokenizer, settings, context_length(model), reward)
    responses = generate(model, tokenizer, prompts.ids, settings)
    rewards = compute_rewards(reward, responses.prompts, responses.texts, prompts.columns)
    error = float(rewards.std()) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    return {"test_return": float(rewards.mean()), "standard_error": error}


def make_validation_target(task: Task) -> ValidationLoss:
    """Return the target of a task's demonstrations, cut to the model's context."""
    return ValidationLoss.of(task.demonstrations, task.tokenizer, max_length=context_length(task.model))


def make_scored_target(kind: str, demonstrations: str | None, tokenizer: Any, batch_size: int) -> Target:
    """Return a target of `whence llm score`: "validation" by demonstrations, or a key of `RESPONSE_TARGETS`."""
    if kind == "validation":
        return ValidationLoss.of(load_data(str(demonstrations)), tokenizer, batch_size=batch_size)
    return RESPONSE_TARGETS[kind](batch_size=batch_size)


def make_response_target(task: Task, examples: Iterable[tuple[Prompt, str]]) -> ValidationLoss:
    """Return the mean log-probability of the tokens of all responses, each with its end-of-text token.

    Prompts are texts or the messages of chats; where the task's are chats, a text is asked as a chat of one message.
    """
    target = ValidationLoss.of([_make_demonstration(task, *example) for example in examples], task.tokenizer)
    assert target.rows is not None
    unknown, context = task.tokenizer.unk_token_id, context_length(task.model)
    for prompt, response in zip(*list_tokens(target.rows)[:2], strict=True):
        ids = [*prompt, *response]
        if unknown in ids and unknown != task.tokenizer.eos_token_id:
            text = task.tokenizer.decode(ids)
            raise WhenceError(
                f"The run's tokenizer does not know all characters: it reads prompt and response as {text!r}."
            )
        if context is not None and len(ids) > context:
            raise WhenceError(f"Prompt and response have {len(ids)} tokens, and the model reads at most {context}.")
    return target


def _make_demonstration(task: Task, prompt: Prompt, response: str) -> dict[str, Any]:
    if not isinstance(prompt, str) or not isinstance(next(iter(task.prompts))["prompt"], str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return {"prompt": messages, "completion": [{"role": "assistant", "content": response}]}
    if not task.tokenizer(prompt)["input_ids"]:
        raise WhenceError(f"The prompt {prompt!r} has no token, and a response follows one at least. Write a prompt.")
    return {"prompt": prompt, "completion": response}


def scoring_memory(config: LanguageConfig) -> int | None:
    """Return the bytes that scoring may hold: ample for small laboratories; None, those of a pass, for other models."""
    return 2**31 if config.has_small_model else None


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the bars of loading and saving of Transformers and Datasets, which are on or off for the whole process."""
    datasets_hidden, transformers_shown = datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if not datasets_hidden:
            datasets.enable_progress_bars()
        if transformers_shown:
            logging.enable_progress_bar()


def load_function(name: str) -> Any:
    """Return the function "path/to/file.py:function" or "package.module:function"; its module is run.

    Modules are looked for in the working directory and on PYTHONPATH; those that a file imports also in its folder.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise WhenceError(f"{name!r} names no function; give file.py:function or package.module:function.")
    try:
        if source.endswith(".py"):
            module = _run_file(Path(source).resolve(), Path(source).stat().st_mtime_ns)
        else:
            with search_first(Path.cwd()):
                module = importlib.import_module(source)
    except Exception as error:
        raise WhenceError(
            f"{source}, from {name}, cannot be run: {first_line(error)}. Modules are looked for in the working "
            f"directory ({Path.cwd()}) and on PYTHONPATH."
        ) from error
    if not callable(function := getattr(module, attribute, None)):
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise WhenceError(f"{source} has no function {attribute!r}.{suggest(attribute, names)}")
    return function


class _FromSource(SourceFileLoader):
    """Runs a file without stored bytecode, which may be of an edit in the same second."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


@cache
def _run_file(path: Path, modified: int) -> ModuleType:
    """Return a file as a module; it is run once for all its functions, and again after a modification."""
    loader = _FromSource(f"whence_user_{path.stem}_{modified}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses look up their module
    with search_first(path.parent):
        loader.exec_module(module)
    return module


def load_data(name: str) -> Any:
    """Return the data set of a directory, a file or an id; if it has splits, the one named train, or the first."""
    kind = {".jsonl": "json"}.get(Path(name).suffix, Path(name).suffix[1:])
    try:
        if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):  # by save_to_disk
            data = datasets.load_from_disk(name)
        elif kind in ("json", "csv", "parquet"):
            data = datasets.load_dataset(kind, data_files=name)
        else:
            data = datasets.load_dataset(name)
        data = data["train" if "train" in data else next(iter(data))] if isinstance(data, dict) else data
        list_columns(data)
    except Exception as error:
        raise WhenceError(f"The data set {name} cannot be loaded: {first_line(error)}") from error
    return data


def load_language_model(name: str, dtype: str, kind: Any = AutoModelForCausalLM, **options: Any) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer.

    A tokenizer without a pad token pads with the end-of-text token; masks separate padding from ends.
    """
    # A stranger's run may name anything of torch's, and torch imports some of that when it is asked for.
    if not isinstance(known := vars(torch).get(str(dtype)), torch.dtype):
        raise WhenceError(f"A model's dtype is {dtype!r}; one of torch's is needed, such as float32.")
    model = load_pretrained(kind, name, dtype=known, **options)
    tokenizer = load_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_checkpoint(name: str, dtype: str) -> tuple[Any, Any]:
    """Return the causal language model of a folder or an id, or a PEFT adapter with its base, and the tokenizer."""
    kind, options = choose_loader(name)
    model, tokenizer = load_language_model(name, dtype, kind, **options)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Return the model or tokenizer that one of Transformers' Auto classes loads from a directory or id.

    Weights are read from safetensors alone, since other formats are pickles, and no code that comes with a model runs.
    """
    what, remedy = "tokenizer" if kind is AutoTokenizer else "model", ""
    try:
        if what == "model":
            check_kernels(name)
            options["use_safetensors"] = True
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            remedy = " whence runs no code that comes with a model: load it in a script, and pass it to the trainer."
        elif "safetensors" in str(error):
            remedy = " whence reads weights from safetensors alone: other formats are pickles, which may run code. "
            remedy += "Convert those you trust: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)."
        raise WhenceError(f"The {what} {name} cannot be loaded: {first_line(error)}{remedy}") from error


def load_trained_model(model: Any, folder: Path) -> Any:
    """Return the model in a folder in Transformers' format; where it is an adapter, the model with this adapter."""
    if not has_adapter(model):
        return load_pretrained(AutoModelForCausalLM, str(folder), dtype=model.dtype).to(model.device)
    load_adapter(model, folder)
    return model
