"""The settings that each laboratory trains with: tables by algorithm, task and size."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from whence.errors import WhenceError, suggest

TASKS = ("arithmetic", "civility")
"""Laboratories by name."""

DEFAULT_ROUNDS = 100
"""Rounds of a run whose settings do not say how many."""

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
"""By names of `PPOConfig`, by task and size."""

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
"""By TRL's names, and `rounds` and `eval_every`."""


def task_settings(task: str | None, size: str, algorithm: str) -> dict[str, Any]:
    """Return what a task sets for an algorithm where that differs from the algorithm's defaults.

    Raises:
        WhenceError: the task has no such size.
    """
    if task is None:
        return {}
    tables = _PPO if algorithm == "ppo" else _TRL
    sizes = [known for name, known in tables if name == task]
    if size not in sizes:
        raise WhenceError(f"The task {task} has no size {size!r}.{suggest(size, sizes)}")
    return {**tables[task, size], **({"beta": 0.0} if algorithm == "rloo" else {})}
