"""Which rollouts taught a model to game its grader, and what keeps it from learning that."""
