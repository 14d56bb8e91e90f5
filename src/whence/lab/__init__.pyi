from .agents.configurations import configure as configure
from .agents.configurations import plan_comparison as plan_comparison
from .agents.run_config import RunConfig as RunConfig
from .agents.training import is_finished as is_finished
from .agents.training import run as run
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .comparison import load_comparison as load_comparison
from .comparison import run_sweep as run_sweep
from .comparison_page import write_comparison as write_comparison
from .kept_runs import load_sweep as load_sweep
from .kept_runs import summarise_sweep as summarise_sweep
from .plans import read_sweep as read_sweep
from .rounds.round_scores import attribute_round as attribute_round

# isort: split
# What the command and the studies import besides.
from .arms import ARMS as ARMS
from .arms import CONTROL as CONTROL
from .arms import LANGUAGE_ARMS as LANGUAGE_ARMS
from .arms import LANGUAGE_TARGETS as LANGUAGE_TARGETS
from .arms import STANDARD as STANDARD
from .arms import read_presets as read_presets
from .arms import split_arm as split_arm
from .kept_runs import KEYS as KEYS
from .kept_runs import KeptRun as KeptRun
from .kept_runs import Results as Results
from .kept_runs import put_row as put_row
from .kept_runs import read_rows as read_rows
from .kept_runs import write_rows as write_rows
from .plans import AnyConfig as AnyConfig
from .plans import Planned as Planned
from .plans import make_label as make_label
from .plans import read_config as read_config
from .plans import runner_of as runner_of
from .tables import READING as READING
from .tables import make_summary as make_summary
from .tables import write_tables as write_tables
