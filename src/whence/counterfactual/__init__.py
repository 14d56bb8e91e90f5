"""Counterfactuals: rounds trained again without some of their records, as ground truth."""

from whence.counterfactual.lds import compute_lds as compute_lds
from whence.counterfactual.proofs import Proof as Proof
from whence.counterfactual.retrain import NOBODY as NOBODY
from whence.counterfactual.retrain import Orders as Orders
from whence.counterfactual.retrain import draw_subsets as draw_subsets
from whence.counterfactual.retrain import reshuffle as reshuffle
from whence.counterfactual.retrain import retrain as retrain
