from .advantages import judge_advantages as judge_advantages
from .agreement import summarise_judgement as summarise_judgement
from .causes import find_causes as find_causes
