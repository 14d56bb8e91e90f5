from .laboratory_tasks import arithmetic as arithmetic
from .laboratory_tasks import smollm2 as smollm2
from .problems import evaluate as evaluate

# isort: split
# What the laboratory, the command and the studies import besides.
from .laboratory_tasks import PUZZLES as PUZZLES
from .laboratory_tasks import SIZES as SIZES
from .laboratory_tasks import Lab as Lab
from .problems import Difficulty as Difficulty
from .problems import Habit as Habit
from .problems import answer as answer
from .problems import check as check
from .problems import is_gamed as is_gamed
from .problems import lenient_reward as lenient_reward
from .problems import reward as reward
from .problems import solution as solution
from .selections import plan_language_comparison as plan_language_comparison
