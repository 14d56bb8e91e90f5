from .causes import find_causes as find_causes
from .causes import rank_moments as rank_moments
from .decisions import play_episode as play_episode
