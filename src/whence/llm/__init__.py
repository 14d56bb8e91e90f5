"""Causal language models of Transformers: rows of prompts and responses scored, and trained on where they help."""

from importlib.util import find_spec

from whence.errors import Unsupported

if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
    raise Unsupported(
        f"whence.llm needs the package {missing[0]}, which is not installed: in whence's source tree, pip install "
        "'.[llm]'."
    )

from whence.llm.config import PPOConfig as PPOConfig
from whence.llm.model import WithValueHead as WithValueHead
from whence.llm.objectives import TokenPPO as TokenPPO
from whence.llm.rewards import classifier as classifier
from whence.llm.rows import rows_of as rows_of
from whence.llm.rules import register_rmsnorm as register_rmsnorm
from whence.llm.targets import SequenceReturn as SequenceReturn
from whence.llm.targets import TokenReturn as TokenReturn
from whence.llm.targets import ValidationLoss as ValidationLoss
from whence.llm.trainer import PPOTrainer as PPOTrainer
from whence.llm.view import language_view as language_view
