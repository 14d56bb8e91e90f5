from .agents.fresh_rollouts import estimate_advantages as estimate_advantages
from .agents.rounds import compare_policies as compare_policies
from .agents.rounds import load_recording as load_recording
from .agents.rounds import load_round as load_round
from .agents.rounds import measure_returns as measure_returns
from .imported_rollouts import import_rollouts as import_rollouts
from .language.language_config import LanguageConfig as LanguageConfig

# isort: split
# What only whence imports besides.
from .agents.replaying import replay_episode as replay_episode
from .differences import Comparison as Comparison
from .differences import Difference as Difference
from .differences import compare_runs as compare_runs
from .logs import LOG_FILES as LOG_FILES
from .logs import Logs as Logs
from .logs import find_logs as find_logs
from .logs import read_logs as read_logs
