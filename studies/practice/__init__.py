"""Training with and without selection, at the settings that people use: IIF against PPO and its controls."""
