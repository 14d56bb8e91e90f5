from .buffer import collect as collect
from .buffer import snapshot as snapshot
from .callback import Choice as Choice
from .callback import InfluenceCallback as InfluenceCallback
from .callback import RoundResult as RoundResult
from .episodes import RecordResets as RecordResets
from .objective import model_objective as model_objective
from .replay import replay_round as replay_round
