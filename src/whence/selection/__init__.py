"""Selection: the records of a round that train, and the rules that choose them."""

from whence.selection.column_rules import AdvantageMagnitude as AdvantageMagnitude
from whence.selection.column_rules import FromMask as FromMask
from whence.selection.column_rules import MaxVariance as MaxVariance
from whence.selection.column_rules import ZeroVariance as ZeroVariance
from whence.selection.own_scores import DTV as DTV
from whence.selection.own_scores import choose_target as choose_target
from whence.selection.own_scores import find_scorer as find_scorer
from whence.selection.own_scores import score_for as score_for
from whence.selection.score_rules import IIF as IIF
from whence.selection.score_rules import IPPO as IPPO
from whence.selection.score_rules import BelowMean as BelowMean
from whence.selection.score_rules import NonPositive as NonPositive
from whence.selection.score_rules import RandomDrop as RandomDrop
from whence.selection.score_rules import read_scores as read_scores
from whence.selection.selections import DEFAULT_SHARE as DEFAULT_SHARE
from whence.selection.selections import KeepAll as KeepAll
from whence.selection.selections import Progress as Progress
from whence.selection.selections import ScoreAll as ScoreAll
from whence.selection.selections import Selection as Selection
from whence.selection.selections import SelectionRule as SelectionRule
from whence.selection.selections import check_rule as check_rule
from whence.selection.tables import add_selection as add_selection
from whence.selection.tables import read_weights as read_weights
from whence.selection.tables import summarise_selection as summarise_selection
from whence.selection.units import AGENT_UNITS as AGENT_UNITS
from whence.selection.units import LANGUAGE_UNITS as LANGUAGE_UNITS
