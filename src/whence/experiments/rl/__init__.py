"""Runs of PPO on environments."""
