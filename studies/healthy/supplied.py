"""Environments whose package leaves something to its user: prices, set points, actions from -1 to 1."""

from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
from numpy.typing import NDArray


def make_portfolio(days: int = 300, assets: int = 4) -> Any:
    """Share money among assets, as rlportfolio does."""
    from rlportfolio.environment.portfolio_optimization_env import PortfolioOptimizationEnv

    frames = [_candles(days, seed=seed).reset_index(names="date").assign(tic=f"asset{seed}") for seed in range(assets)]
    return PortfolioOptimizationEnv(
        pd.concat(frames), initial_amount=10_000, time_window=10, print_metrics=False, plot_graphs=False
    )


def make_reactor(steps: int = 60) -> Any:
    """Keep the concentration of pcgym's stirred tank reactor at two set points, by the temperature of its coolant."""
    from pcgym import make_env

    half = steps // 2
    return make_env(
        {
            "N": steps,
            "tsim": 26,
            "SP": {"Ca": [0.85] * half + [0.9] * (steps - half)},
            "o_space": {"low": np.array([0.7, 300.0, 0.8]), "high": np.array([1.0, 350.0, 0.9])},
            "a_space": {"low": np.array([295.0]), "high": np.array([302.0])},
            "x0": np.array([0.8, 330.0, 0.8]),
            "r_scale": {"Ca": 1e3},
            "model": "cstr",
            "normalise_a": True,
            "normalise_o": True,
            "noise": True,
            "noise_percentage": 1e-3,
            "integration_method": "casadi",
        }
    )


def make_scaled(id: str) -> gym.Env[Any, Any]:
    """Make an environment whose actions, of whatever range, are reached from -1 to 1."""
    env = gym.make(id)
    space = env.action_space
    assert isinstance(space, gym.spaces.Box)

    def scale(action: NDArray[Any]) -> NDArray[Any]:
        scaled = space.low + (np.clip(action, -1, 1) + 1) / 2 * (space.high - space.low)
        return (scaled.round() if space.dtype.kind == "i" else scaled).astype(space.dtype)

    return gym.wrappers.TransformAction(env, scale, gym.spaces.Box(-1.0, 1.0, space.shape, np.float32))


def _candles(days: int, seed: int) -> pd.DataFrame:
    """Return daily prices of an asset whose trend returns to zero."""
    rng = np.random.default_rng(seed)
    trend = np.zeros(days)
    for day in range(1, days):
        trend[day] = 0.95 * trend[day - 1] + 0.002 * rng.standard_normal()
    close: NDArray[Any] = 100 * np.exp(np.cumsum(trend + 0.01 * rng.standard_normal(days)))
    opening = np.concatenate([[100.0], close[:-1]])
    spread = 1 + 0.002 * rng.random(days)
    return pd.DataFrame(
        {
            "high": np.maximum(opening, close) * spread,
            "low": np.minimum(opening, close) / spread,
            "close": close,
        },
        index=pd.date_range("2020-01-01", periods=days, freq="D"),
    )
