"""Which module runs which kind of configuration: reinforcement learning's, or a language model's."""

from typing import Any, TypeAlias

from whence.experiments import language, training
from whence.experiments.config import RunConfig
from whence.experiments.language import LanguageConfig

AnyConfig: TypeAlias = RunConfig | LanguageConfig
"""One run of either kind."""


def kind_of(config: AnyConfig) -> Any:
    """Return the module with `run`, `is_finished` and `curve` for such a configuration."""
    return language if isinstance(config, LanguageConfig) else training


def config_of(values: Any) -> AnyConfig:
    """Return the configuration that its `to_json` gave."""
    return RunConfig.from_json(values) if "env" in values else LanguageConfig.from_json(values)
