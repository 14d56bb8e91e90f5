"""Whether advantages are wrong in the records that harm (LDA §4.1), on three environments.

Run: `python -m studies.diagnosis.run results/diagnosis [--only frozenlake/seed_0]`. Plain PPO trains; a few rounds of
it are then judged: `judgement.judge_advantages` measures the advantage of each record, and the two are compared
by influence on the return.

- FrozenLake, all records: by visits, as LDA does, and exactly, from the environment's table of transitions.
- MiniGrid and LunarLander, a sample of records: by fresh rollouts from the rebuilt states; MiniGrid by visits, too.

A finished round is not judged again: the command goes on where it was interrupted. Training runs are kept in `--runs`.
`python -m studies.diagnosis.tables results/diagnosis` tabulates what is there.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import torch
import typer
from rich.console import Console
from rich.progress import track

from studies.diagnosis.agreement import summarise_judgement
from studies.diagnosis.judgement import Measure, judge_advantages
from studies.diagnosis.visits import compare_signs
from studies.stored import round_numbers, write_line
from whence import lab, stored
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.sb3.episodes import open_env
from whence.stored.agents import make_replay_env


@dataclass(frozen=True)
class Setup:
    """An environment and optimiser of the study.

    Attributes:
        preset: of the environment.
        rounds: those that are judged.
        seeds: the number of seeds.
        measures: how advantages are measured.
        changes: fields of the run that differ from the preset's.
        records: of a round that fresh rollouts judge.
        continuations: from each of these records with its action, and as many with the policy's.
    """

    preset: str
    rounds: tuple[int, ...]
    seeds: int
    measures: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    records: int = 300
    continuations: int = 16


ADAM = {"optimizer": "Adam", "hyperparameters": {"learning_rate": 3e-4, "max_grad_norm": 0.5}}
"""Stable-Baselines3's default."""

SETUPS = {
    "frozenlake": Setup("lda-code/frozenlake", (2, 5, 10), 5, ("visits", "exact")),  # LDA's rounds, Fig. 8
    "minigrid": Setup("lda-code/minigrid", (5, 15, 30), 3, ("visits", "rollouts")),  # LDA's round is 5, Fig. 3
    # Its later rollouts hover for a thousand steps.
    "lunarlander-sgd": Setup("lda-code/lunarlander", (5, 10, 20), 3, ("rollouts",), {}, records=150, continuations=8),
    "lunarlander-adam": Setup(
        "lda-code/lunarlander", (5, 10, 20), 3, ("rollouts",), ADAM, records=150, continuations=8
    ),
}

KEYS = ("setup", "seed", "round", "measure")
"""What tells lines of the results apart; they are in this order."""

RUNS = Path("out/diagnosis")


@dataclass(frozen=True)
class Job:
    """One round of a training run of the study."""

    setup: str
    seed: int
    round: int

    @property
    def run(self) -> str:
        """Where its run is below `--runs`, and the beginning of its name in `--only`."""
        return f"{self.setup}/seed_{self.seed}"

    @property
    def name(self) -> str:
        """Its name in `--only`."""
        return f"{self.run}/round_{self.round}"


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = RUNS,
    only: Annotated[str, typer.Option(help="Jobs whose name begins so: minigrid/seed_0.")] = "",
) -> None:
    """Judge what is not there yet, the first rounds of all runs before the next: those take longer."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    for job in track([job for job in list_jobs() if job.name.startswith(only)], "rounds", console=console):
        began = time.process_time()
        study_round(job, out, runs)
        console.print(f"{job.name}: {time.process_time() - began:.0f} s")


def list_jobs() -> list[Job]:
    """Return the jobs of the study in their order."""
    return [
        Job(name, seed, setup.rounds[place])
        for place in range(max(len(setup.rounds) for setup in SETUPS.values()))
        for name, setup in SETUPS.items()
        if place < len(setup.rounds)
        for seed in range(setup.seeds)
    ]


def study_round(job: Job, out: Path, runs: Path) -> None:
    """Train a run where that is not done, and judge one of its rounds."""
    setup = SETUPS[job.setup]
    stored = read_rows(results_file(out), KEYS)
    missing = [measure for measure in setup.measures if (job.setup, job.seed, job.round, measure) not in stored]
    if not missing:
        return
    run = train(job.setup, job.seed, runs / job.run, setup.rounds[-1])
    for measure in missing:
        began = time.process_time()
        judged = judge_round(run, setup, job.round, measure, job.seed)
        content = {"setup": job.setup, "seed": job.seed, "round": job.round, "measure": measure}
        content |= describe(run, job.round, judged) | {"seconds": time.process_time() - began}
        write_line(results_file(out), round_numbers(content), KEYS)


def train(name: str, seed: int, path: Path, rounds: int) -> RunDirectory:
    """Return a run of plain PPO of so many rounds; train it where that is not done."""
    setup = SETUPS[name]
    config = lab.configure(preset=setup.preset, arm="ppo", seed=seed, rounds=rounds, eval_episodes=0, **setup.changes)
    lab.run(config, path)
    return RunDirectory.open(path)


def results_file(out: Path) -> Path:
    """Return the file of the results: a line for each round and measure."""
    return out / "rounds.parquet"


def judge_round(
    run: RunDirectory, setup: Setup, number: int, measure: Measure | Literal["exact"], seed: int
) -> pl.DataFrame:
    """Return the judgement of a round by "visits", "rollouts", or "exact"."""
    if measure == "exact":
        return judge_exactly(run, number)
    sample = {"records": setup.records, "continuations": setup.continuations} if measure == "rollouts" else {}
    return judge_advantages(run, number, measure, seed=seed, **sample)


def judge_exactly(run: RunDirectory, number: int) -> pl.DataFrame:
    """Return the judgement of a round of FrozenLake by the advantages that follow from its table of transitions."""
    judged = judge_advantages(run, number, "visits")
    model, _ = stored.load_round(run, number)
    with open_env(make_replay_env(run)) as env:
        values, advantages = solve(env.unwrapped.P, policy_table(model), model.gamma)
    states = judged.join(run.round("records", number).select("record_id", "observation"), on="record_id", how="left")
    at = states["observation"].to_numpy()
    return compare_signs(
        judged.with_columns(
            pl.Series("mc_advantage", advantages[at, judged["action"].to_numpy()]),
            pl.Series("mc_value", values[at]),
            mc_error=pl.lit(0.0),
            mc_value_error=pl.lit(0.0),
            measured=pl.lit("exact"),
        )
    )


def policy_table(model: Any) -> np.ndarray[Any, Any]:
    """Return the policy's probability of each action in each state, (states, actions)."""
    states = torch.arange(model.observation_space.n)
    with torch.no_grad():
        distribution = model.policy.get_distribution(model.policy.obs_to_tensor(states.numpy())[0]).distribution
    probabilities: np.ndarray[Any, Any] = distribution.probs.double().numpy()
    return probabilities


def solve(
    transitions: Mapping[int, Mapping[int, list[tuple[float, int, float, bool]]]],
    policy: np.ndarray[Any, Any],
    gamma: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the values (states,) and advantages (states, actions) of a policy; time limits are left out.

    Args:
        transitions: by state and action, (probability, next state, reward, whether the episode ends).
        policy: (states, actions) probabilities.
        gamma: discount factor.
    """
    shape = policy.shape
    rewards, following = np.zeros(shape), np.zeros((*shape, shape[0]))
    for state, action in np.ndindex(*shape):
        for probability, then, reward, ended in transitions[state][action]:
            rewards[state, action] += probability * reward
            following[state, action, then] += probability * (not ended)
    expected, moves = (policy * rewards).sum(axis=1), np.einsum("sa,sat->st", policy, following)
    values = np.linalg.solve(np.eye(shape[0]) - gamma * moves, expected)
    return values, rewards + gamma * following @ values - values[:, None]


def describe(run: RunDirectory, number: int, judged: pl.DataFrame) -> dict[str, Any]:
    """Return what a line holds of a judgement, and the mean return of the round's last hundred episodes."""
    metrics = run.table("metrics").filter(pl.col("round") == number)
    returned = metrics["episode_return"][0] if "episode_return" in metrics.columns else None
    return {"episode_return": returned, **summarise_judgement(judged)}


if __name__ == "__main__":
    typer.run(main)
