"""Whether a run's phases show its changes."""
