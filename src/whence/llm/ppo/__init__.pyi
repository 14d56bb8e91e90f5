from .ppo_round import make_rollout as make_rollout
from .ppo_run import load_parameters as load_parameters
from .retraining import Recipe as Recipe
from .retraining import evaluate_log_probs as evaluate_log_probs
from .retraining import read_recipe as read_recipe
from .retraining import read_trl_settings as read_trl_settings
from .retraining import train_again as train_again
from .trainer import PPOTrainer as PPOTrainer
