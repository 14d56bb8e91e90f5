"""Training runs as data: presets, arms, comparisons and what they are measured by."""

from whence.experiments.arms import ARMS as ARMS
from whence.experiments.arms import STANDARD as STANDARD
from whence.experiments.arms import Arm as Arm
from whence.experiments.compare import Comparison as Comparison
from whence.experiments.compare import compare as compare
from whence.experiments.compare import load as load
from whence.experiments.config import RunConfig as RunConfig
from whence.experiments.config import plan as plan
from whence.experiments.config import presets as presets
from whence.experiments.metrics import Curve as Curve
from whence.experiments.metrics import summarise as summarise
