"""PPO for causal language models."""

from whence.llm.ppo.ppo_rollout import make_rollout as make_rollout
from whence.llm.ppo.ppo_run import load_parameters as load_parameters
from whence.llm.ppo.retraining import Recipe as Recipe
from whence.llm.ppo.retraining import evaluate_log_probs as evaluate_log_probs
from whence.llm.ppo.retraining import read_recipe as read_recipe
from whence.llm.ppo.retraining import train_again as train_again
from whence.llm.ppo.trainer import PPOTrainer as PPOTrainer
