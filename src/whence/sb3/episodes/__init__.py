"""Episodes of environments: resets, replays, frames, EnvPool, and their state in a checkpoint."""

from whence.sb3.episodes.attributes import is_plain as is_plain
from whence.sb3.episodes.environment_state import accept_resets as accept_resets
from whence.sb3.episodes.environment_state import explain_inexact as explain_inexact
from whence.sb3.episodes.environment_state import read_environments as read_environments
from whence.sb3.episodes.environment_state import restore_environments as restore_environments
from whence.sb3.episodes.environment_state import restore_vec_wrappers as restore_vec_wrappers
from whence.sb3.episodes.resets import ResetTracker as ResetTracker
