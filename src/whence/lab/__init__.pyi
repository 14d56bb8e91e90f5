from .agents.plan import configure as configure
from .agents.plan import plan_comparison as plan_comparison
from .agents.training import is_finished as is_finished
from .agents.training import run as run
from .comparison import Comparison as Comparison
from .comparison import compare as compare
from .comparison import load_comparison as load_comparison
from .comparison_page import write_comparison as write_comparison
from .rounds.round_scores import attribute_round as attribute_round
from .sweep import load_sweep as load_sweep
from .sweep import run_sweep as run_sweep
from .sweep import summarise_sweep as summarise_sweep
from .sweepfile import read_sweep as read_sweep
from .tables import READING as READING
from .tables import make_summary as make_summary
from .tables import write_tables as write_tables

# isort: split
# What only other rooms of whence import.
from .rowfile import put_row as put_row
from .rowfile import read_rows as read_rows
from .rowfile import write_rows as write_rows
from .sweep import KeptRun as KeptRun
from .sweep import Results as Results
from .sweepfile import Planned as Planned
from .sweepfile import make_label as make_label
from .workers import AnyConfig as AnyConfig
from .workers import read_config as read_config
from .workers import runner_of as runner_of
