"""What whence relies on in Stable-Baselines3: an upgrade that moves it fails here, not in somebody's training."""

import inspect

import numpy as np
import pytest
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from helpers.contracts import check_each, takes
from helpers.toys import Toy, model
from whence import Unsupported
from whence.sb3 import InfluenceCallback
from whence.sb3.models.descriptions import HYPERPARAMETERS
from whence.sb3.models.supported_models import MODEL_NAMES

TOY = model(n_envs=2, normalised=True).learn(64)


def makes_its_networks_later() -> bool:
    toy = PPO("MlpPolicy", None, _init_setup_model=False)
    return not hasattr(toy, "policy") and takes(toy._setup_model, "")


def saves_an_observation() -> bool:
    env = DummyVecEnv([Toy, Toy])
    env._save_obs(1, np.ones(5, np.float32))
    return env.buf_obs[None][1].tolist() == [1] * 5 and env._obs_from_buf()[1].tolist() == [1] * 5


def lists_alone_forward_rollouts() -> bool:
    plain, kinds = BaseCallback._on_rollout_start, (CallbackList, EvalCallback, EveryNTimesteps)
    return [kind._on_rollout_start is plain for kind in kinds] == [False, True, True]


PRIVATE = {
    "_last_obs": lambda: TOY._last_obs.shape == (2, 5),
    "_last_original_obs": lambda: TOY._last_original_obs.shape == (2, 5),
    "_last_episode_starts": lambda: TOY._last_episode_starts.dtype == bool,
    "_vec_normalize_env": lambda: (model()._vec_normalize_env, TOY._vec_normalize_env) == (None, TOY.env),
    "_stats_window_size": lambda: TOY._stats_window_size == TOY.ep_info_buffer.maxlen,
    "_total_timesteps": lambda: TOY._total_timesteps == 64,
    "_episode_num": lambda: TOY._episode_num == 0,
    "_n_updates": lambda: TOY._n_updates == TOY.n_epochs,
    "_current_progress_remaining": lambda: TOY._current_progress_remaining == 0,
    "_logger": lambda: TOY._logger is TOY.logger,
    "_init_callback": lambda: isinstance(TOY._init_callback(None), BaseCallback),
    "_on_rollout_start": lists_alone_forward_rollouts,
    "_setup_model": makes_its_networks_later,
    "_init_setup_model": makes_its_networks_later,
    "_get_samples": lambda: takes(RolloutBuffer._get_samples, "batch_inds env"),
    "_predict": lambda: takes(ActorCriticPolicy._predict, "observation deterministic"),
    "_get_action_dist_from_latent": lambda: takes(ActorCriticPolicy._get_action_dist_from_latent, "latent_pi"),
    "_save_obs": saves_an_observation,
    "_obs_from_buf": saves_an_observation,
    "_get_indices": lambda: list(TOY.env._get_indices(None)) == [0, 1],
    "_reset_seeds": lambda: "self._reset_seeds()" in inspect.getsource(DummyVecEnv.reset),
}

test_private = check_each(PRIVATE)


def test_the_seams_in_training() -> None:
    assert list(inspect.signature(RolloutBuffer.get).parameters) == ["self", "batch_size"]
    get, collecting = inspect.getsource(RolloutBuffer.get), inspect.getsource(PPO.collect_rollouts)
    assert get.count("np.random.permutation") == 1
    assert "self._get_samples(indices[" in get
    assert collecting.index("compute_returns_and_advantage") < collecting.index("callback.on_rollout_end()")
    names = PPO.collect_rollouts.__code__.co_varnames  # of which callbacks read
    assert {"rewards", "new_obs", "dones", "infos", "actions", "clipped_actions"} <= {*names}
    assert "self.rollout_buffer.get(self.batch_size)" in inspect.getsource(PPO.train)
    assert "self.rollout_buffer.get(batch_size=None)" in inspect.getsource(A2C.train)
    assert "rollout_buffer" in PPO._excluded_save_params(model())
    assert set(HYPERPARAMETERS) == {  # whatever else PPO takes is listed as no hyper-parameter
        *("learning_rate", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "clip_range_vf"),
        *("normalize_advantage", "ent_coef", "vf_coef", "max_grad_norm", "use_sde", "sde_sample_freq", "target_kl"),
    }
    assert all(hasattr(model(), name) for name in HYPERPARAMETERS)


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name != "_init_callback"])
def test_a_release_without_a_name_is_refused_before_training(name: str) -> None:
    toy = model()
    delattr(toy, name)
    with pytest.raises(Unsupported, match=f"stable_baselines3 .* has no `{name}`"):
        InfluenceCallback().init_callback(toy)
