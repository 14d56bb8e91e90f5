"""Selection: the records of a round that train, and the rules that choose them."""

from whence.selection.advantage_rules import AdvantageMismatch as AdvantageMismatch
from whence.selection.advantage_rules import TDErrorPriority as TDErrorPriority
from whence.selection.score_rules import IIF as IIF
from whence.selection.score_rules import IPPO as IPPO
from whence.selection.score_rules import BelowMean as BelowMean
from whence.selection.score_rules import NegativeRandom as NegativeRandom
from whence.selection.score_rules import NonPositive as NonPositive
from whence.selection.score_rules import RandomDrop as RandomDrop
from whence.selection.score_rules import read_scores as read_scores
from whence.selection.selections import DEFAULT_SHARE as DEFAULT_SHARE
from whence.selection.selections import KeepAll as KeepAll
from whence.selection.selections import Progress as Progress
from whence.selection.selections import Selection as Selection
from whence.selection.selections import SelectionRule as SelectionRule
from whence.selection.selections import check_rule as check_rule
from whence.selection.tables import add_selection as add_selection
from whence.selection.tables import read_weights as read_weights
from whence.selection.tables import summarise_selection as summarise_selection
from whence.selection.visits import compute_td_errors as compute_td_errors
from whence.selection.visits import has_single_actions as has_single_actions
from whence.selection.visits import measure_by_visits as measure_by_visits
from whence.selection.visits import number_states as number_states
