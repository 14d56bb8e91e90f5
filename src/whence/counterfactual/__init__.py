"""Counterfactuals: a round trained again without some of its records, as ground truth."""

from whence.counterfactual.interventions import VARIANTS as VARIANTS
from whence.counterfactual.interventions import intervene as intervene
from whence.counterfactual.interventions import summarise_changes as summarise_changes
from whence.counterfactual.lds import Study as Study
from whence.counterfactual.lds import compute_lds as compute_lds
from whence.counterfactual.lds import measure_agreement as measure_agreement
from whence.counterfactual.lds import study as study
from whence.counterfactual.outcomes import Evaluate as Evaluate
from whence.counterfactual.outcomes import compute_scores as compute_scores
from whence.counterfactual.removals import SHARES as SHARES
from whence.counterfactual.removals import leave_out as leave_out
from whence.counterfactual.retrain import NOBODY as NOBODY
from whence.counterfactual.retrain import Orders as Orders
from whence.counterfactual.retrain import draw_subsets as draw_subsets
from whence.counterfactual.retrain import reshuffle as reshuffle
from whence.counterfactual.retrain import retrain as retrain
