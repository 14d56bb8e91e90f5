"""SB3's models: read as records, trained on selections, recorded, replayed and described."""

from whence.sb3.base.environment_names import Names as Names
from whence.sb3.base.environment_names import check_names as check_names
from whence.sb3.base.environment_names import read_names as read_names
from whence.sb3.base.environment_source import describe_factory as describe_factory
from whence.sb3.base.environment_steps import EnvironmentSteps as EnvironmentSteps
from whence.sb3.base.environment_steps import load_statistics as load_statistics
from whence.sb3.base.model_description import LIBRARIES as LIBRARIES
from whence.sb3.base.model_description import describe_model as describe_model
from whence.sb3.base.model_tensors import load_tensors as load_tensors
from whence.sb3.base.model_tensors import named_tensors as named_tensors
from whence.sb3.base.nonfinite_training import check_observation as check_observation
from whence.sb3.base.nonfinite_training import check_step as check_step
from whence.sb3.base.nonfinite_training import watch_training as watch_training
from whence.sb3.base.recorder import Recorder as Recorder
from whence.sb3.base.recorder import check_groups as check_groups
from whence.sb3.base.recorder import check_recordings as check_recordings
from whence.sb3.base.recorder import model_objective as model_objective
from whence.sb3.base.rollout_buffer import Ongoing as Ongoing
from whence.sb3.base.rollout_buffer import begin_episodes as begin_episodes
from whence.sb3.base.rollout_buffer import read_buffer as read_buffer
from whence.sb3.base.sampling import Last as Last
from whence.sb3.base.sampling import cancel_hook as cancel_hook
from whence.sb3.base.sampling import claim_learn as claim_learn
from whence.sb3.base.sampling import select_from as select_from
from whence.sb3.base.sampling import wrap_next as wrap_next
