"""The base of the callback: records, sampling, policies and recordings of Stable-Baselines3."""
