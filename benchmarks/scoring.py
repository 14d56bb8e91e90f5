"""What scoring costs, beside one plain pass over the same records, SB3's optimisation, and one training step's memory.

Run: `python -m benchmarks.scoring [--repeats 100]`. Everything in one process, one torch thread; the things compared
take turns, and medians of their ratios are printed, so that a busy machine slows all alike.

- "plain pass": the advantages normalised, `policy.evaluate_actions` on all records and `backward()` of
  mean(A log pi) into all parameters.
- "scoring": all of `whence.attribute(policy, records, target=Return(), engine=...)`.
- "optimisation": SB3's `train()` of the same rollout, 10 epochs of minibatches of 64.
- "memory": the most bytes that scoring a chunk of 256 records holds in tensors at a time, over those of one training
  step (SB3's loss, backward, clipping, Adam) on a minibatch of the same 256.
- "ten targets": scoring for ten actions over scoring for one of them.
"""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import gymnasium as gym
import minigrid.wrappers
import numpy as np
import torch
import typer
from gymnasium import spaces
from rich.console import Console
from rich.progress import track
from rich.table import Table
from stable_baselines3 import PPO
from torch import nn

import whence
from whence.engines.memory import measure_bytes
from whence.experiments.rl.networks import MiniGridCNN
from whence.sb3 import collect

CHUNK = 256
ENGINES = ("ghost", "forward", "vmap")


class Frames(gym.Env[Any, Any]):
    """Four random 84x84 frames, the shape of Atari's observations: what they show plays no part in what they cost."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def _frames(self) -> Any:
        return self.np_random.integers(0, 256, (4, 84, 84), dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._frames(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on for fifty steps or so, with a random reward."""
        return self._frames(), float(self.np_random.normal()), bool(self.np_random.random() < 0.02), False, {}


def lunar_lander_mlp() -> PPO:
    """SB3's default 64x64 tanh policy on LunarLander."""
    return PPO("MlpPolicy", gym.make("LunarLander-v3"), n_steps=2048, seed=0, device="cpu")


def minigrid_cnn() -> PPO:
    """LDA's convolutional policy on MiniGrid-Empty-8x8."""
    env = minigrid.wrappers.ImgObsWrapper(gym.make("MiniGrid-Empty-8x8-v0"))
    kwargs = {"features_extractor_class": MiniGridCNN, "net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    return PPO("CnnPolicy", env, n_steps=2048, policy_kwargs=kwargs, seed=0, device="cpu")


def nature_cnn() -> PPO:
    """SB3's default convolutional policy on 84x84x4 frames."""
    return PPO("CnnPolicy", Frames(), n_steps=512, seed=0, device="cpu")


@dataclass(frozen=True)
class Case:
    """A policy to measure; `share` of the repeats, where one takes long."""

    name: str
    make: Callable[[], PPO]
    share: float


CASES = (
    Case("LunarLander MLP", lunar_lander_mlp, 1),
    Case("MiniGrid CNN", minigrid_cnn, 0.5),
    Case("Nature CNN", nature_cnn, 0.1),
)


def plain_pass(model: PPO, records: whence.RecordBatch) -> Callable[[], None]:
    """Return one forward and backward pass over the records, as a training step on all of them would make it."""

    def run() -> None:
        model.policy.optimizer.zero_grad()
        advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
        _, log_prob, _ = model.policy.evaluate_actions(records.observations, records.actions)
        (advantages * log_prob).mean().backward()

    return run


def training_step(model: PPO, records: whence.RecordBatch) -> Callable[[], None]:
    """Return one step of the optimisation on all the records at once: what SB3's `train()` does with a minibatch."""

    def run() -> None:
        advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
        value, log_prob, entropy = model.policy.evaluate_actions(records.observations, records.actions)
        ratio = (log_prob - records.log_probs).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss = -surrogate + 0.5 * nn.functional.mse_loss(value.flatten(), records.returns) - 0.0 * entropy.mean()
        model.policy.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.policy.parameters(), 0.5)
        model.policy.optimizer.step()

    return run


def scoring(model: PPO, records: whence.RecordBatch, engine: str, **more: Any) -> Callable[[], None]:
    """Return one scoring of the records."""

    def run() -> None:
        whence.attribute(model.policy, records, **{"target": whence.Return(), "engine": engine, **more})

    return run


def median_seconds(*runs: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Let `runs` take turns; return their median seconds, and the median ratio of each to the first of its turn."""
    turns = []
    warm_up = max(1, repeats // 5)
    for turn in range(repeats + warm_up):
        seconds = []
        for run in runs:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        if turn >= warm_up:
            turns.append(seconds)
    columns = list(zip(*turns, strict=True))
    ratios = [statistics.median(s / turn[0] for s, turn in zip(column, turns, strict=True)) for column in columns]
    return [statistics.median(column) for column in columns], ratios


def memory_ratio(model: PPO, records: whence.RecordBatch, engine: str) -> float:
    """Return the most bytes held while scoring a chunk, over those of a training step on it."""
    chunk = records.take(slice(0, CHUNK))
    step, score = training_step(model, chunk), scoring(model, chunk, engine, chunk_size=CHUNK)
    step()  # the first one makes Adam's state, which stays
    score()
    return max(measure_bytes(score)) / max(measure_bytes(step))


def ten_targets(model: PPO, records: whence.RecordBatch, engine: str, repeats: int) -> float:
    """Return the time for ten targets over the time for one."""
    actions = {str(i): whence.Action(records.observations[i], records.actions[i]) for i in range(10)}
    one = scoring(model, records, engine, target=actions["0"])
    return median_seconds(one, scoring(model, records, engine, target=actions), repeats=repeats)[1][1]


def main(
    repeats: Annotated[int, typer.Option(help="Turns per figure, after a warm-up of a fifth as many.", min=10)] = 100,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    np.random.seed(0)
    machine = platform.processor() or platform.machine()
    table = Table(title=f"One thread, {machine}, torch {torch.__version__}")
    for heading in ("policy", "records", "engine"):
        table.add_column(heading)
    for heading in ("plain pass", "scoring", "scoring / plain pass", "/ optimisation", "memory", "ten targets"):
        table.add_column(heading, justify="right")
    for case, engine in track([(case, engine) for case in CASES for engine in ENGINES], "Measuring"):
        model = case.make()
        records = collect(model)
        turns = max(5, round(case.share * repeats))
        score = scoring(model, records, engine)
        (plain, scored), (_, ratio) = median_seconds(plain_pass(model, records), score, repeats=turns)
        tenfold = ten_targets(model, records, engine, max(5, turns // 5))
        memory = memory_ratio(model, records, engine)
        model.learn(len(records))  # fills the model's own buffer, for train()
        (optimisation,), _ = median_seconds(model.train, repeats=3)
        cells = (f"{plain * 1e3:.2f} ms", f"{scored * 1e3:.2f} ms", f"{ratio:.2f}", f"{scored / optimisation:.2%}")
        table.add_row(case.name, str(len(records)), engine, *cells, f"{memory:.2f}", f"{tenfold:.1f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
