"""Laboratories: small tasks with a model and data, made in minutes and without a network."""

from whence.llm.lab.evaluation import evaluate as evaluate
from whence.llm.lab.laboratory import SIZES as SIZES
from whence.llm.lab.laboratory import Lab as Lab
from whence.llm.lab.laboratory import arithmetic as arithmetic
from whence.llm.lab.pretrained import LONGEST as LONGEST
from whence.llm.lab.pretrained import PUZZLES as PUZZLES
from whence.llm.lab.pretrained import smollm2 as smollm2
from whence.llm.lab.problems import Difficulty as Difficulty
from whence.llm.lab.problems import Habit as Habit
from whence.llm.lab.problems import answer as answer
from whence.llm.lab.problems import check as check
from whence.llm.lab.problems import is_gamed as is_gamed
from whence.llm.lab.problems import lenient_reward as lenient_reward
from whence.llm.lab.problems import reward as reward
from whence.llm.lab.problems import solution as solution
