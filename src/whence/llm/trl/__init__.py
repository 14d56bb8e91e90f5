"""GRPO and RLOO by TRL's trainers."""
