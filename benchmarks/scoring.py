"""What scoring a rollout costs, beside one plain pass over it and beside SB3's optimisation.

Run: `python -m benchmarks.scoring [--repeats 100]`. Everything in one process, one torch thread; the things compared
take turns, and medians of their ratios are printed, so that a busy machine slows all alike.

- "plain pass": the advantages normalised, `policy.evaluate_actions` on all 2,048 records and `backward()` of
  mean(A log pi) into all parameters.
- "scoring": all of `whence.attribute(policy, records, target=Return(), engine=...)`.
- "optimisation": SB3's `train()` of the same rollout, 10 epochs of minibatches of 64.
"""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import gymnasium as gym
import minigrid.wrappers
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

import whence
from whence.sb3 import collect

N = 2048


class MiniGridCNN(BaseFeaturesExtractor):
    """LDA's MiniGrid network (LDA §B.2): two 3x3 convolutions of 16 and 32 filters, then a linear layer of 64."""

    def __init__(self, observation_space: gym.spaces.Box) -> None:
        super().__init__(observation_space, features_dim=64)
        channels, height, width = observation_space.shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * (height - 4) * (width - 4), 64), nn.ReLU()),
        )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return (n, 64) features of (n, channels, height, width) images scaled to [0, 1]."""
        return self.layers(observations)


def lunar_lander_mlp() -> PPO:
    """SB3's default 64x64 tanh policy on LunarLander."""
    return PPO("MlpPolicy", gym.make("LunarLander-v3"), n_steps=N, seed=0, device="cpu")


def minigrid_cnn() -> PPO:
    """LDA's convolutional policy on MiniGrid-Empty-8x8."""
    env = minigrid.wrappers.ImgObsWrapper(gym.make("MiniGrid-Empty-8x8-v0"))
    kwargs = {"features_extractor_class": MiniGridCNN, "net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    return PPO("CnnPolicy", env, n_steps=N, policy_kwargs=kwargs, seed=0, device="cpu")


def plain_pass(model: PPO, records: whence.RecordBatch) -> Callable[[], None]:
    """Return one forward and backward pass over the records, as a training step on all of them would make it."""

    def run() -> None:
        model.policy.optimizer.zero_grad()
        advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
        _, log_prob, _ = model.policy.evaluate_actions(records.observations, records.actions)
        (advantages * log_prob).mean().backward()

    return run


def scoring_pass(model: PPO, records: whence.RecordBatch, engine: str) -> Callable[[], None]:
    """Return one scoring of the records."""

    def run() -> None:
        whence.attribute(model.policy, records, target=whence.Return(), engine=engine)

    return run


def median_seconds(*runs: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Let `runs` take turns; return their median seconds, and the median ratio of each to the first of its turn."""
    turns = []
    for turn in range(repeats + repeats // 5):
        seconds = []
        for run in runs:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        if turn >= repeats // 5:  # the first fifth warms caches up
            turns.append(seconds)
    columns = list(zip(*turns, strict=True))
    ratios = [statistics.median(s / turn[0] for s, turn in zip(column, turns, strict=True)) for column in columns]
    return [statistics.median(column) for column in columns], ratios


def optimisation_seconds(model: PPO, repeats: int) -> float:
    """Return the median seconds of SB3's `train()` on the rollout in the model's buffer."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.train()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main(
    repeats: Annotated[int, typer.Option(help="Turns per figure, after a warm-up of a fifth as many.", min=5)] = 100,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    np.random.seed(0)
    table = Table(
        title=f"{N} records, one thread, {platform.processor() or platform.machine()}, torch {torch.__version__}"
    )
    for heading in ("policy", "engine", "plain pass", "scoring", "scoring / plain pass", "share of optimisation"):
        table.add_column(heading, justify="left" if heading in ("policy", "engine") else "right")
    for name, make in (("LunarLander MLP", lunar_lander_mlp), ("MiniGrid CNN", minigrid_cnn)):
        model = make()
        records = collect(model)
        model.learn(N)  # fills the model's own buffer, for train()
        for engine in ("ghost", "forward"):
            score = scoring_pass(model, records, engine)
            (plain, scoring), (_, ratio) = median_seconds(plain_pass(model, records), score, repeats=repeats)
            share = scoring / optimisation_seconds(model, 5)
            cells = (f"{plain * 1e3:.2f} ms", f"{scoring * 1e3:.2f} ms", f"{ratio:.2f}", f"{share:.2%}")
            table.add_row(name, engine, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
