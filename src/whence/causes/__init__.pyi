from .decision_causes import find_causes as find_causes
from .decision_proofs import prove_decision as prove_decision
from .decisions import play_episode as play_episode
from .grid_map import GridMap as GridMap
from .grid_map import map_extremes as map_extremes
from .ranking import rank_moments as rank_moments
from .ranking import rank_records as rank_records
from .response_causes import find_response_causes as find_response_causes
from .response_proofs import prove_response as prove_response

# isort: split
# What only other rooms of whence import.
from .decisions import compare_log_probs as compare_log_probs
from .decisions import read_record as read_record
from .grid_map import has_map as has_map
from .proofs import Proof as Proof
from .proofs import format_outcome as format_outcome
from .ranking import sum_rounds as sum_rounds
from .response_causes import measure_trained as measure_trained
