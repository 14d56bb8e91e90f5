from .causes import find_causes as find_causes
