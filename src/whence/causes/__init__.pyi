from .decisions import play_episode as play_episode
from .finders import find_causes as find_causes
from .grid_map import GridMap as GridMap
from .grid_map import map_extremes as map_extremes
from .proofs import Proof as Proof
from .proofs import prove as prove
from .ranking import rank_moments as rank_moments
from .ranking import rank_records as rank_records
from .repetitions import Repetition as Repetition
from .repetitions import repeat as repeat
from .response_causes import Examples as Examples
from .retraining import AgentTraining as AgentTraining
from .retraining import LanguageTraining as LanguageTraining

# isort: split
# What only other rooms of whence import.
from .conditions import EXAMPLE as EXAMPLE
from .conditions import select_where as select_where
from .decisions import compare_log_probs as compare_log_probs
from .decisions import read_actions as read_actions
from .decisions import read_record as read_record
from .finders import check_kind as check_kind
from .grid_map import has_map as has_map
from .proofs import format_outcome as format_outcome
from .ranking import OnRound as OnRound
from .ranking import sum_rounds as sum_rounds
from .response_causes import measure_trained as measure_trained
