"""An environment in which choosing records loses: SB3's own IdentityEnv, where the action has to repeat four bits.

Run: `python -m studies.practice.identity [--seeds 20]`; it prints the table that results/practice/README.md holds. PPO
trains at its defaults but for `gamma=0.4`, as SB3's own test does, for 3,000 steps, which are two rounds.
"""

import logging
import statistics
from collections.abc import Callable

import typer
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnvMultiBinary
from stable_baselines3.common.evaluation import evaluate_policy

from whence import IIF, RandomDrop, SelectionRule
from whence.sb3 import InfluenceCallback

ARMS: dict[str, Callable[[int], SelectionRule | None]] = {
    "PPO": lambda seed: None,
    "IIF(0.125)": lambda seed: IIF(0.125),
    "RandomDrop(0.125)": lambda seed: RandomDrop(0.125, seed=seed),
}


def train(rule: SelectionRule | None, seed: int) -> tuple[float, float]:
    """Train, and return the mean return of 20 episodes without and with sampled actions, of 100 at most."""
    env = make_vec_env(lambda: IdentityEnvMultiBinary(4), seed=seed)
    model = PPO("MlpPolicy", env, gamma=0.4, seed=seed, device="cpu")
    model.learn(3_000, callback=None if rule is None else InfluenceCallback(rule))
    greedy, sampled = (
        evaluate_policy(model, env, n_eval_episodes=20, deterministic=deterministic) for deterministic in (True, False)
    )
    return float(greedy[0]), float(sampled[0])


def main(seeds: int = 20) -> None:
    """Train each arm with each seed, and print means with their standard errors."""
    logging.getLogger("whence").setLevel(logging.ERROR)
    print("| arm | greedy return | return of sampled actions |\n| --- | --- | --- |")
    for name, make_rule in ARMS.items():
        columns = zip(*(train(make_rule(seed), seed) for seed in range(seeds)), strict=True)
        cells = [f"{statistics.fmean(c):.1f} ± {statistics.stdev(c) / len(c) ** 0.5:.1f}" for c in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
