"""What whence relies on in Gymnasium beyond its documentation."""

import inspect

import gymnasium as gym
import pytest
from gymnasium.wrappers import TimeLimit

from helpers.contracts import check_each
from helpers.toys import Toy

OF_WRAPPERS = "_cached_spec", "_metadata", "_action_space", "_observation_space"
ENV = TimeLimit(Toy(), 5)
ENV.reset(seed=3)


def destroys_the_world_before() -> bool:
    pytest.importorskip("Box2D")
    from gymnasium.envs.box2d import BipedalWalker

    return "self._destroy()" in inspect.getsource(BipedalWalker.reset)


def marks_final_infos() -> bool:
    """A vector that resets at once says which environments it holds the last infos of."""
    envs = gym.vector.SyncVectorEnv([lambda: TimeLimit(Toy(), 1)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    envs.reset()
    infos = envs.step(envs.action_space.sample())[-1]
    return isinstance(infos["final_info"], dict) and bool(infos["_final_info"].all())


PRIVATE = {
    "_final_info": marks_final_infos,
    "_saved_kwargs": lambda: ENV._saved_kwargs == {"max_episode_steps": 5},
    **{name: lambda name=name: name in vars(ENV) for name in OF_WRAPPERS},
    "_np_random": lambda: Toy()._np_random is None and ENV.unwrapped._np_random is ENV.np_random,
    "_np_random_seed": lambda: Toy()._np_random_seed is None and ENV.unwrapped._np_random_seed == 3,
    "_destroy": destroys_the_world_before,
    "_action_set": lambda: pytest.importorskip("ale_py") and gym.make("ALE/Pong-v5").unwrapped._action_set,
}

test_private = check_each(PRIVATE)
