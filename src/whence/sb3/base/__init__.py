"""What records, rules and rounds are in Stable-Baselines3."""
