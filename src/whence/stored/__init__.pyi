from .agents.fresh_rollouts import estimate_advantages as estimate_advantages
from .agents.policy_changes import compare_policies as compare_policies
from .agents.replaying import replay_episode as replay_episode
from .agents.rounds import load_recording as load_recording
from .agents.rounds import load_round as load_round
from .agents.rounds import measure_returns as measure_returns

# isort: split
# What only other rooms of whence import.
from .arms import ARMS as ARMS
from .arms import CONTROL as CONTROL
from .arms import LANGUAGE_ARMS as LANGUAGE_ARMS
from .arms import LANGUAGE_TARGETS as LANGUAGE_TARGETS
from .arms import STANDARD as STANDARD
from .arms import Arm as Arm
from .arms import counts_scoring as counts_scoring
from .arms import find_arm as find_arm
from .arms import place_arm as place_arm
from .arms import split_arm as split_arm
