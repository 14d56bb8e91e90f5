"""Whether recorded rounds tell how to set PPO."""
