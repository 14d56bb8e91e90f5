"""The laboratory: a small task with a model and data, made in minutes and without a network."""

from whence.llm.lab.arithmetic import SIZES as SIZES
from whence.llm.lab.arithmetic import Lab as Lab
from whence.llm.lab.arithmetic import Settings as Settings
from whence.llm.lab.arithmetic import arithmetic as arithmetic
from whence.llm.lab.evaluation import evaluate as evaluate
from whence.llm.lab.model import Imitation as Imitation
from whence.llm.lab.model import Shape as Shape
from whence.llm.lab.problems import Difficulty as Difficulty
from whence.llm.lab.problems import Habit as Habit
from whence.llm.lab.problems import Verdict as Verdict
from whence.llm.lab.problems import check as check
from whence.llm.lab.problems import reward as reward
