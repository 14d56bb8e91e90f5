"""What would have come of a round without some of its records: ground truth by training it again."""

from whence.counterfactual.gains import gains as gains
from whence.counterfactual.interventions import intervene as intervene
from whence.counterfactual.linear import Datamodel as Datamodel
from whence.counterfactual.linear import additive_ceiling as additive_ceiling
from whence.counterfactual.linear import datamodel as datamodel
from whence.counterfactual.measures import agreement as agreement
from whence.counterfactual.measures import lds as lds
from whence.counterfactual.measures import predicted as predicted
from whence.counterfactual.removals import leave_out as leave_out
from whence.counterfactual.retrain import NOBODY as NOBODY
from whence.counterfactual.retrain import Orders as Orders
from whence.counterfactual.retrain import reshuffled as reshuffled
from whence.counterfactual.retrain import retrain as retrain
from whence.counterfactual.retrain import subsets as subsets
from whence.counterfactual.scores import scores_of as scores_of
from whence.counterfactual.study import Study as Study
from whence.counterfactual.study import study as study
