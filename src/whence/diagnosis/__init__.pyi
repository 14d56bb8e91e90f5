from .advantages import judge_advantages as judge_advantages
from .agreement import summarise_judgement as summarise_judgement
from .causes import find_causes as find_causes
from .grid_map import GridMap as GridMap
from .grid_map import map_extremes as map_extremes
