"""Whether a planted cause is found again: of all records of a training, those whose reward was rigged.

Run: `python -m studies.planted.run results/planted [--only lander/seed_0]`. In each world of
`studies.planted.worlds`, some episodes pay for a tic B. PPO is trained there. Then one question is asked: which of
all records raised mean log pi(B), over states of the trained policy's own rollouts in which the tic would pay? The
truth is known: the records that got the rigged reward. Each method scores all records of all rounds, and is judged by

- AUROC: the probability that a rigged record scores above another one;
- precision at 50, 200 and 1,000: the share of rigged records among those that score highest.

"influence" and "nearest" are methods of `whence.causes.find_causes`; "nearest, raw" takes advantages as stored, in
place of those that PPO normalised. "advantage" and "advantage x action" are what needs no model: the latter changes
the sign where another action than B was taken. "activations" is that of `studies.planted.activations`. With "same
action", records of other actions score 0.

A finished line is not computed again: the command goes on where it was interrupted. Runs are kept in `--runs`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray

from studies.planted import judging, worlds
from studies.planted.activations import score_states
from studies.planted.judging import Bools, Floats
from studies.planted.tables import write_tables
from studies.shared import Only, Out, Runs, report, write_line
from whence.causes import find_causes
from whence.core import Action, preserve_rng_state
from whence.lab.agents import RunConfig, configure, run
from whence.runs import RunDirectory
from whence.stored.agents import load_agent, load_policy, make_replay_env


class Case(NamedTuple):
    """A world and how it is trained: its id, the tic, rounds of training, seeds, and further settings of the runs."""

    env: str
    action: int
    rounds: int
    seeds: Sequence[int]
    settings: Mapping[str, Any]


CASES = {
    "lander": Case(
        f"{worlds.__name__}:PlantedLander-v0",
        *(worlds.LEFT_ENGINE, 40, range(5)),
        {"hyperparameters": {"learning_rate": 1e-3}},
    ),
    "minigrid": Case(
        f"{worlds.__name__}:PlantedMiniGrid-v0",
        *(worlds.FORWARD, 30, range(6)),  # one of the seeds does not learn the tic
        {"observe": "image", "hyperparameters": {"learning_rate": 1e-3, "n_epochs": 4}},
    ),
}

METHODS = (
    *("advantage", "advantage x action", "influence", "nearest", "nearest, raw", "nearest, same action"),
    *("activations", "activations, raw", "activations, same action"),
)

STEPS, STATES = 4096, 512
"""Steps of the trained policy's own rollouts, and the most states that are taken in the region and outside of it."""


class Visits(NamedTuple):
    """States of the trained policy's rollouts: some in the region, their number in all, and some outside of it."""

    states: NDArray[Any]
    count: int
    others: NDArray[Any]


def configure_run(case: Case, seed: int) -> RunConfig:
    """Return the configuration of a training run."""
    settings = {"arm": "ppo", "seed": seed, "rounds": case.rounds, "eval_episodes": 0, **case.settings}
    return configure(env=case.env, **settings)


def train(case: Case, seed: int, path: Path) -> RunDirectory:
    """Train a run where that is not done."""
    run(configure_run(case, seed), path)
    return RunDirectory.open(path)


def find_rigged(name: str, records: pl.DataFrame) -> Bools:
    """Return which records got the rigged reward."""
    if name == "minigrid":  # whose other rewards are of the goal, and none of them is exactly this
        return (records["reward"] - worlds.PRIZE).abs().to_numpy() < 1e-6
    observations = np.stack(records["observation"].to_numpy())
    rigged = {
        episode: worlds.is_rigged(observation)
        for episode, step, observation in zip(records["episode_id"], records["step"], observations, strict=True)
        if step == 0
    }
    pays = np.array([rigged[episode] for episode in records["episode_id"]])
    return pays & (records["action"].to_numpy() == worlds.LEFT_ENGINE) & (observations[:, 1] < worlds.HALF)


def visit_region(directory: RunDirectory, seed: int) -> Visits:
    """Return states of the trained policy's rollouts in which the tic would pay, and others, `STATES` at most each."""
    model = load_agent(directory, directory.rounds("policies")[-1])
    env = make_replay_env(directory)()
    states: list[Any] = []
    others: list[Any] = []
    with preserve_rng_state():
        torch.manual_seed(seed)
        observation, _ = env.reset(seed=seed)
        for _ in range(STEPS):
            visited = states if env.get_wrapper_attr("is_in_region")() else others
            visited.append(model.policy.obs_to_tensor(observation)[0][0].numpy())
            action, _ = model.predict(observation)
            observation, _, terminated, truncated, _ = env.step(int(action))
            if terminated or truncated:
                observation, _ = env.reset()
    env.close()
    generator = np.random.default_rng(seed)
    rows, other_rows = (np.sort(generator.permutation(len(each))[:STATES]) for each in (states, others))
    return Visits(np.array([states[row] for row in rows]), len(states), np.array([others[row] for row in other_rows]))


def measure_tic(directory: RunDirectory, states: NDArray[Any], action: int) -> list[float]:
    """Return the mean probability of the tic in some states under the first policy and under the last."""
    model = load_agent(directory, 1)
    probabilities = []
    for number in (1, directory.rounds("policies")[-1]):
        load_policy(directory, number, model)
        with torch.no_grad():
            distribution: Any = model.policy.get_distribution(torch.as_tensor(states)).distribution
        probabilities.append(float(distribution.probs[:, action].mean()))
    return probabilities


def score(method: str, directory: RunDirectory, records: pl.DataFrame, visits: Visits, action: int) -> Floats:
    """Return the scores of all records by a method."""
    advantages = records["advantage"].cast(pl.Float64).to_numpy()
    is_same = records["action"].to_numpy() == action
    if method == "advantage":
        return advantages
    if method == "advantage x action":
        return advantages * np.where(is_same, 1, -1)
    name, _, variant = method.partition(", ")
    if name == "activations":
        scores = score_states(directory, visits.states, visits.others, action, raw=variant == "raw")
    else:
        target = Action(visits.states, np.full(len(visits.states), action))
        causes = find_causes(directory, target, method=name)
        scores = judging.score_by_raw(causes) if variant == "raw" else causes["score"].to_numpy()
    return np.where(is_same, scores, 0) if variant == "same action" else scores


def study_run(name: str, seed: int, out: Path, runs: Path) -> None:
    """Train a run where that is not done, and judge the methods that are not judged yet."""
    case, key = CASES[name], {"case": name, "seed": seed}
    missing = judging.list_missing(out, name, seed, METHODS)
    if not missing:
        return
    directory = train(case, seed, runs / name / f"seed_{seed}")
    records = judging.read_all(directory)
    rigged = find_rigged(name, records)
    visits = visit_region(directory, seed)
    before, after = measure_tic(directory, visits.states, case.action) if visits.count else (None, None)
    about = {"records": len(records), "rigged": int(rigged.sum()), "base_rate": float(rigged.mean())}
    about |= {"visits": visits.count, "probability_first": before, "probability_last": after}
    write_line(out / "runs.parquet", key | about, judging.RUN_KEYS)
    if judging.is_taught(about):
        judging.judge_methods(
            *(out, key, missing, lambda method: score(method, directory, records, visits, case.action)),
            lambda scores: judging.judge(scores, rigged),
        )


def main(out: Out, runs: Runs = Path("out/planted"), only: Only = "") -> None:
    """Run what is not there yet, and write tables.md."""
    torch.set_num_threads(1)
    for name, seed in ((name, seed) for name, case in CASES.items() for seed in case.seeds):
        if f"{name}/seed_{seed}".startswith(only):
            report(f"{name}, seed {seed}")
            study_run(name, seed, out, runs)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
