"""The two kinds of runs: reinforcement learning, and post-training of language models."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from whence.experiments.llm.language_config import LanguageConfig
from whence.experiments.rl.config import RunConfig
from whence.metrics import Curve

AnyConfig: TypeAlias = RunConfig | LanguageConfig
"""One run of either kind."""


def runner_of(config: AnyConfig) -> Any:
    """Return the module that runs such a configuration: it has `prepare`, `run` and `is_finished`.

    What it trains with is imported here.
    """
    module = "llm.language_training" if isinstance(config, LanguageConfig) else "rl.training"
    return import_module(f"whence.experiments.{module}")


def read_config(values: Any) -> AnyConfig:
    """Return the configuration that its `to_json` returned.

    Raises:
        WhenceError: the values are no configuration's.
    """
    is_agent = isinstance(values, Mapping) and "env" in values
    return RunConfig.from_json(values) if is_agent else LanguageConfig.from_json(values)


def read_curve(config: AnyConfig, path: Path) -> Curve:
    """Return a finished run's learning curve, without what it was trained with."""
    module = "llm.outputs" if isinstance(config, LanguageConfig) else "rl.training"
    curve: Curve = import_module(f"whence.experiments.{module}").read_curve(config, path)
    return curve
