"""Rollouts that any trainer wrote to files: read in one form, and scored into a run directory."""

from whence.llm.files.rollout_files import NAMES as NAMES
from whence.llm.files.rollout_files import read_steps as read_steps
from whence.llm.files.scored_rollouts import SCORED as SCORED
from whence.llm.files.scored_rollouts import add_advantages as add_advantages
from whence.llm.files.scored_rollouts import score_rollouts as score_rollouts
