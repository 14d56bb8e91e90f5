"""Training runs as data: presets, arms, comparisons and what they are measured by."""

from whence.experiments.arms import ARMS as ARMS
from whence.experiments.arms import STANDARD as STANDARD
from whence.experiments.arms import Arm as Arm
from whence.experiments.compare import Comparison as Comparison
from whence.experiments.compare import compare as compare
from whence.experiments.compare import load as load
from whence.experiments.config import HYPERPARAMETERS as HYPERPARAMETERS
from whence.experiments.config import TARGETS as TARGETS
from whence.experiments.config import RunConfig as RunConfig
from whence.experiments.config import presets as presets
from whence.experiments.metrics import Curve as Curve
from whence.experiments.metrics import summarise as summarise
from whence.experiments.plan import configure as configure
from whence.experiments.plan import plan as plan
from whence.experiments.replay import load_recording as load_recording
from whence.experiments.replay import load_round as load_round
from whence.experiments.sweep import Kept as Kept
from whence.experiments.sweep import Results as Results
from whence.experiments.sweep import load_sweep as load_sweep
from whence.experiments.sweep import summarise_sweep as summarise_sweep
from whence.experiments.sweep import sweep as sweep
from whence.experiments.sweepfile import Planned as Planned
from whence.experiments.sweepfile import read_sweep as read_sweep
from whence.experiments.training import is_finished as is_finished
from whence.experiments.training import run as run
