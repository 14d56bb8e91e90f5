"""The settings of training on each laboratory: tables by algorithm, task and size."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from whence.errors import WhenceError, suggest

TASKS = ("arithmetic",)
"""Laboratories by name."""

DEFAULT_ROUNDS = 100
"""Rounds of a run whose settings do not have `rounds`."""

_PPO: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
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
    }
)
"""Settings of `PPOConfig`, by task and size."""

_TRL: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType(
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
    }
)
"""Settings of TRL's GRPOConfig and RLOOConfig with `rounds` and `eval_every`, by task and size."""


def task_settings(task: str | None, size: str, algorithm: str) -> dict[str, Any]:
    """Return a task's settings of an algorithm that differ from the algorithm's defaults.

    Raises:
        WhenceError: the task has no such size.
    """
    if task is None:
        return {}
    table = _PPO if algorithm == "ppo" else _TRL
    sizes = [known for name, known in table if name == task]
    if size not in sizes:
        raise WhenceError(f"The task {task} has no size {size!r}.{suggest(size, sizes)}")
    return {**table[task, size], **({"beta": 0.0} if algorithm == "rloo" else {})}
