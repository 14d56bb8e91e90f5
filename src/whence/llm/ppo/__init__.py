"""PPO for causal language models."""

from whence.llm.ppo.ppo_round import evaluate_rows as evaluate_rows
from whence.llm.ppo.ppo_round import make_rollout as make_rollout
from whence.llm.ppo.ppo_run import load_parameters as load_parameters
from whence.llm.ppo.trainer import PPOTrainer as PPOTrainer
