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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import typer

from studies.diagnosis.agreement import summarise_judgement
from studies.diagnosis.judgement import judge_advantages
from studies.diagnosis.visits import compare_signs
from studies.shared import Only, Out, Runs, report, write_line
from whence import lab, stored
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.sb3.episodes import open_env
from whence.stored.agents import make_replay_env


class Setup(NamedTuple):
    """An environment and optimiser of the study.

    `rounds` of so many `seeds` of a `preset` are judged by each of `measures`; `changes` are fields of the run that
    differ from the preset's. Fresh rollouts judge so many `records` of a round, by so many `continuations` from each
    with its action, and as many with the policy's.
    """

    preset: str
    rounds: tuple[int, ...]
    seeds: int
    measures: tuple[str, ...]
    changes: Mapping[str, Any] = {}
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


class Job(NamedTuple):
    """One round of a training run of the study."""

    setup: str
    seed: int
    round: int

    @property
    def run(self) -> str:
        """Where its run is below `--runs`, and the beginning of its name in `--only`."""
        return f"{self.setup}/seed_{self.seed}"


def main(out: Out, runs: Runs = Path("out/diagnosis"), only: Only = "") -> None:
    """Judge what is not there yet, the first rounds of all runs before the next: those take longer."""
    torch.set_num_threads(1)
    for job in list_jobs():
        if f"{job.run}/round_{job.round}".startswith(only):
            began = time.process_time()
            study_round(job, out, runs)
            report(f"{job.run}, round {job.round}: {time.process_time() - began:.0f} s")


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
    setup, stored = SETUPS[job.setup], read_rows(out / "rounds.parquet", KEYS)
    for measure in [measure for measure in setup.measures if (*job, measure) not in stored]:
        run = train(job, runs)
        began = time.process_time()
        judged = judge_round(run, job, measure)
        metrics = run.table("metrics").filter(pl.col("round") == job.round)
        returned = metrics["episode_return"][0] if "episode_return" in metrics.columns else None
        content = {**job._asdict(), "measure": measure, "episode_return": returned, **summarise_judgement(judged)}
        write_line(out / "rounds.parquet", content | {"seconds": time.process_time() - began}, KEYS)


def train(job: Job, runs: Path) -> RunDirectory:
    """Return a run of plain PPO; train it where that is not done."""
    setup = SETUPS[job.setup]
    settings = {"seed": job.seed, "rounds": setup.rounds[-1], "eval_episodes": 0, **setup.changes}
    lab.run(lab.configure(preset=setup.preset, arm="ppo", **settings), runs / job.run)
    return RunDirectory.open(runs / job.run)


def judge_round(run: RunDirectory, job: Job, measure: str) -> pl.DataFrame:
    """Return the judgement of a round by "visits", "rollouts", or "exact"."""
    if measure == "exact":
        return judge_exactly(run, job.round)
    setup = SETUPS[job.setup]
    sample = {"records": setup.records, "continuations": setup.continuations} if measure == "rollouts" else {}
    return judge_advantages(run, job.round, measure, seed=job.seed, **sample)


def judge_exactly(run: RunDirectory, number: int) -> pl.DataFrame:
    """Return the judgement of a round of FrozenLake by the advantages that follow from its table of transitions."""
    judged = judge_advantages(run, number, "visits")
    model, _ = stored.load_round(run, number)
    with open_env(make_replay_env(run)) as env:
        values, advantages = solve(env.unwrapped.P, policy_table(model), model.gamma)
    at = judged["observation"].to_numpy()
    return compare_signs(
        judged.with_columns(
            pl.Series("mc_advantage", advantages[at, judged["action"].to_numpy()]),
            pl.Series("mc_value", values[at]),
            mc_error=pl.lit(0.0),
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


if __name__ == "__main__":
    typer.run(main)
