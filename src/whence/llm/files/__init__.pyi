from .rollout_files import NAMES as NAMES
from .rollout_files import read_steps as read_steps
from .scored_rollouts import SCORED as SCORED
from .scored_rollouts import add_advantages as add_advantages
from .scored_rollouts import score_rollouts as score_rollouts
