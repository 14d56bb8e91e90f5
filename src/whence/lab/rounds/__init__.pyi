from .retraining import compute_lds as compute_lds
from .retraining import draw_subsets as draw_subsets
from .retraining import reshuffle as reshuffle
from .retraining import retrain as retrain

# isort: split
# What the laboratory, the command and the studies import besides.
from .replay import MARGIN as MARGIN
from .replay import Point as Point
from .replay import SteppedRound as SteppedRound
from .replay import check_finite as check_finite
from .replay import check_target as check_target
from .replay import check_weights as check_weights
from .replay import open_round as open_round
from .replay import raise_on_divergence as raise_on_divergence
from .replay import step as step
from .retraining import NOBODY as NOBODY
from .retraining import Orders as Orders
from .round_scores import METHODS as METHODS
from .round_scores import attribute_round as attribute_round
from .round_scores import snapshot_scores as snapshot_scores
