from .trainers import InfluenceGRPOTrainer as InfluenceGRPOTrainer
from .trainers import InfluenceRLOOTrainer as InfluenceRLOOTrainer
