"""The trainer's configuration of a run: whence's PPOConfig, or TRL's GRPOConfig or RLOOConfig."""

from dataclasses import fields
from typing import Any

import torch

from whence.errors import WhenceError, suggest
from whence.experiments.llm.language_config import DEFAULT_ROUNDS, LanguageConfig


def make_trainer_config(config: LanguageConfig, output_dir: str) -> Any:
    """Return the `PPOConfig`, or TRL's GRPOConfig or RLOOConfig, of a run.

    Raises:
        WhenceError: a setting is unknown or out of its range.
        Unsupported: the arm cannot select under one of TRL's settings; see `check_selectable`.
    """
    return _make_ppo_config(config, output_dir) if config.algorithm == "ppo" else _make_trl_config(config, output_dir)


def max_response_tokens(config: LanguageConfig) -> int | None:
    """Return the tokens of the longest response that the task needs; None without a task."""
    from whence.llm.lab import SIZES

    if config.task is None:
        return None
    return SIZES[config.size].difficulty.longest + 1


def _make_ppo_config(config: LanguageConfig, output_dir: str) -> Any:
    from whence.llm.base.ppo_config import PPOConfig

    known = PPOConfig.__dataclass_fields__
    if unknown := [name for name in config.settings if name not in known or name in ("output_dir", "seed")]:
        raise WhenceError(f"A run's PPO has no setting {unknown[0]!r}.{suggest(unknown[0], known)}")
    settings: dict[str, Any] = {"disable_tqdm": True}  # commands show their own progress bar
    if (longest := max_response_tokens(config)) is not None:
        settings["max_new_tokens"] = longest
    return PPOConfig(output_dir, **{**settings, **config.all_settings, "seed": config.seed})


def _make_trl_config(config: LanguageConfig, output_dir: str) -> Any:
    import trl

    from whence.llm.trl.supported_settings import check_selectable

    kind = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[config.algorithm]
    known = [one.name for one in fields(kind) if one.init and one.name not in ("output_dir", "seed", "max_steps")]
    if unknown := [name for name in config.settings if name not in (*known, "rounds", "eval_every")]:
        raise WhenceError(f"{kind.__name__} has no setting {unknown[0]!r}.{suggest(unknown[0], [*known, 'rounds'])}")
    settings = config.all_settings
    if (longest := max_response_tokens(config)) is not None:
        settings = {"max_completion_length": longest, **settings}
    rounds, eval_every = settings.pop("rounds", DEFAULT_ROUNDS), settings.pop("eval_every", 1)
    for name, value, least in (("rounds", rounds, 1), ("eval_every", eval_every, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise WhenceError(f"{name} is {value!r}; a whole number, at least {least}, is needed.")
    on_gpu = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "bf16": False,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
    }
    if not {"save_strategy", "save_steps"} & settings.keys():
        defaults |= {"save_strategy": "no", "save_total_limit": 2}  # the run itself says when checkpoints are due
    # Under the name that this version of Transformers has; TRL's default is the older name, which gives a warning.
    checkpointing = [name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known]
    if not any(name in settings for name in checkpointing):
        defaults[checkpointing[0]] = config.task is None  # laboratories are small
    steps = rounds * settings.get("num_iterations", 1)
    try:
        trainer_config = kind(output_dir, **{**defaults, **settings, "max_steps": steps, "seed": config.seed})
    except ValueError as error:
        raise WhenceError(f"TRL refuses these settings: {error}") from error
    if trainer_config.steps_per_generation != trainer_config.gradient_accumulation_steps:
        raise WhenceError(
            f"steps_per_generation is {trainer_config.steps_per_generation} and gradient_accumulation_steps "
            f"{trainer_config.gradient_accumulation_steps}; a round is one step on a generation batch, so both have to "
            "be equal (num_iterations may be more than 1)."
        )
    if config.selects:
        check_selectable(trainer_config)
    return trainer_config
