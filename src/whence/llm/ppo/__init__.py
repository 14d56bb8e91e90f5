"""PPO for causal language models."""
