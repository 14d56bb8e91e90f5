from .advantages import judge_advantages as judge_advantages
from .agreement import summarise_judgement as summarise_judgement
from .causes import find_causes as find_causes
from .causes import rank_moments as rank_moments
from .decisions import play_episode as play_episode
from .grid_map import GridMap as GridMap
from .grid_map import map_extremes as map_extremes
