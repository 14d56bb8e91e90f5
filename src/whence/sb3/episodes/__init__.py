"""Episodes of environments: resets, replays, frames, EnvPool, and their state in a checkpoint."""
