"""Scores of language models' rows: targets, objectives, and how they are computed."""

from whence.llm.scores.in_step import RoundChooser as RoundChooser
from whence.llm.scores.in_step import Way as Way
from whence.llm.scores.in_step import choose_way as choose_way
from whence.llm.scores.in_step import log_way as log_way
from whence.llm.scores.in_step import scale_gradients as scale_gradients
from whence.llm.scores.language_targets import RESPONSE_TARGETS as RESPONSE_TARGETS
from whence.llm.scores.language_targets import SequenceReturn as SequenceReturn
from whence.llm.scores.language_targets import SequenceReward as SequenceReward
from whence.llm.scores.language_targets import TokenReturn as TokenReturn
from whence.llm.scores.language_targets import ValidationLoss as ValidationLoss
from whence.llm.scores.language_targets import check_held_out as check_held_out
from whence.llm.scores.language_targets import compute_log_probs as compute_log_probs
from whence.llm.scores.language_targets import split_mean as split_mean
from whence.llm.scores.row_scores import Scoring as Scoring
from whence.llm.scores.row_scores import add_reference as add_reference
from whence.llm.scores.row_scores import evaluate_rows as evaluate_rows
from whence.llm.scores.row_scores import score as score
from whence.llm.scores.token_objectives import GroupObjective as GroupObjective
from whence.llm.scores.token_objectives import TokenPPO as TokenPPO
from whence.llm.scores.token_scores import score_target_rows as score_target_rows
from whence.llm.scores.token_scores import score_tokens as score_tokens
