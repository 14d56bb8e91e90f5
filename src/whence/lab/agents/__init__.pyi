from .plan import check_action as check_action
from .plan import configure as configure
from .plan import configure_arms as configure_arms
from .plan import plan_comparison as plan_comparison
from .plan import reads as reads
from .presets import read_presets as read_presets
from .training import run as run
