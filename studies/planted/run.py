"""Whether a planted cause is found again: of all records of a training, those whose reward was rigged.

Run: `python -m studies.planted.run results/planted [--only lander/seed_0] [--methods influence,nearest]`. In each world
of `studies.planted.worlds`, some episodes pay for a tic B. PPO is trained there. Then one question is asked: which of
all records raised mean log pi(B), over states of the trained policy's own rollouts in which the tic would pay? The
truth is known: the records that got the rigged reward. Each method scores all records of all rounds, and is judged by

- AUROC: the probability that a rigged record scores above another one;
- precision at 50, 200 and 1,000: the share of rigged records among those that score highest.

"influence" and "nearest" are methods of `whence.causes.find_causes`. "advantage"
and "advantage x action" are what needs no model: the latter changes the sign where another action than B was taken. The
others are `studies.planted.finders`.

A finished line is not computed again: the command goes on where it was interrupted. Runs are kept in `--runs`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console

from studies.planted import finders, worlds
from studies.planted.scores import (
    METHODS,
    RUN_KEYS,
    SCORE_KEYS,
    STUDIED,
    Bools,
    Floats,
    is_taught,
    judge,
    read_all,
)
from studies.planted.tables import write_tables
from studies.stored import round_numbers, write_line
from whence.causes import find_causes
from whence.causes.ranking import average_nearest
from whence.core import Action, preserve_rng_state
from whence.lab import read_rows
from whence.lab.agents import RunConfig, configure, run
from whence.runs import RunDirectory
from whence.scores.gradient_products import multiply_gradients
from whence.stored.agents import load_agent, load_policy, make_replay_env, read_records


@dataclass(frozen=True)
class Case:
    """A world and how it is trained.

    Attributes:
        env: its id.
        action: the tic.
        rounds: of training.
        seeds: of the study.
        settings: further settings of the runs.
    """

    env: str
    action: int
    rounds: int
    seeds: Sequence[int]
    settings: Mapping[str, Any]


CASES = {
    "lander": Case(
        f"{worlds.__name__}:PlantedLander-v0",
        worlds.LEFT_ENGINE,
        40,
        range(5),
        {"hyperparameters": {"learning_rate": 1e-3}},
    ),
    "minigrid": Case(
        f"{worlds.__name__}:PlantedMiniGrid-v0",
        worlds.FORWARD,
        30,
        range(6),  # one of them does not learn the tic
        {"observe": "image", "hyperparameters": {"learning_rate": 1e-3, "n_epochs": 4}},
    ),
}

STEPS, STATES = 4096, 512
"""Steps of the trained policy's own rollouts, and the most states of the target, drawn from those in the region."""


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


def visit_region(directory: RunDirectory, seed: int) -> tuple[NDArray[Any], int, NDArray[Any]]:
    """Return states of the trained policy's rollouts in which the tic would pay, their number, and other states.

    At most `STATES` of either are returned.
    """
    model = load_agent(directory, directory.rounds("policies")[-1])
    env = make_replay_env(directory)()
    states: tuple[list[Any], list[Any]] = [], []
    with preserve_rng_state():
        torch.manual_seed(seed)
        observation, _ = env.reset(seed=seed)
        for _ in range(STEPS):
            place = 0 if env.get_wrapper_attr("is_in_region")() else 1
            states[place].append(model.policy.obs_to_tensor(observation)[0][0].numpy())
            action, _ = model.predict(observation)
            observation, _, terminated, truncated, _ = env.step(int(action))
            if terminated or truncated:
                observation, _ = env.reset()
    env.close()
    chosen = [np.sort(np.random.default_rng(seed).permutation(len(each))[:STATES]) for each in states]
    inside, others = (np.array([each[row] for row in rows]) for each, rows in zip(states, chosen, strict=True))
    return inside, len(states[0]), others


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


def score(
    method: str, directory: RunDirectory, records: pl.DataFrame, states: NDArray[Any], action: int
) -> tuple[Floats, float]:
    """Return the scores of all records by a method, and the CPU seconds that they took."""
    began = time.process_time()
    advantages = records["advantage"].cast(pl.Float64).to_numpy()
    if method == "advantage":
        return advantages, time.process_time() - began
    if method == "advantage x action":
        return advantages * np.where(records["action"].to_numpy() == action, 1, -1), time.process_time() - began
    causes = find_causes(directory, Action(states, np.full(len(states), action)), method=method)
    return causes["score"].to_numpy(), time.process_time() - began


def score_studied(
    directory: RunDirectory, records: pl.DataFrame, states: NDArray[Any], others: NDArray[Any], action: int
) -> dict[str, Floats]:
    """Return the scores of all records by the methods that are studied; `others` are states outside the region."""
    numbers = directory.rounds()
    model, trained = load_agent(directory, numbers[0]), load_agent(directory, directory.rounds("policies")[-1])
    rounds = [read_records(directory, number, model) for number in numbers]
    examples, counter_examples = (
        Action(each, np.full(len(each), action)).as_records(rounds[0]) for each in (states, others)
    )
    anchors = finders.draw_anchors(rounds[len(rounds) // 2])
    gathered, nearest, observed, hidden = finders.GradientFinders(), [], [], []
    for number, each in zip(numbers, rounds, strict=True):
        load_policy(directory, number, model)
        of_examples, of_anchors = (multiply_gradients(model.policy, each, other) for other in (examples, anchors))
        gathered.add(of_examples, of_anchors, each.advantages)
        nearest.append(average_nearest(multiply_gradients(trained.policy, each, examples).cosines()).numpy())
        observed.append(finders.read_observed(model.policy, each))
        hidden.append(finders.read_hidden(trained.policy, each))
    advantages = records["advantage"].cast(pl.Float64).to_numpy()
    signed = advantages * np.where(records["action"].to_numpy() == action, 1, -1)
    of_states, of_others = (finders.read_hidden(trained.policy, each) for each in (examples, counter_examples))
    return gathered.score() | {
        "nearest-trained": advantages * np.concatenate(nearest),
        "similar": signed * finders.compare_states(torch.cat(observed), finders.read_observed(model.policy, examples)),
        "similar-hidden": signed * finders.compare_states(torch.cat(hidden), of_states),
        "hidden": signed * finders.score_projected(torch.cat(hidden), of_states, of_others),
    }


def list_jobs(only: str) -> Iterator[tuple[str, int]]:
    """Yield the cases and seeds whose name begins so."""
    for name, case in CASES.items():
        yield from ((name, seed) for seed in case.seeds if f"{name}/seed_{seed}".startswith(only))


def study_run(name: str, seed: int, methods: Sequence[str], out: Path, runs: Path) -> None:
    """Train a run where that is not done, and judge the methods that are not judged yet."""
    case, key = CASES[name], {"case": name, "seed": seed}
    done = read_rows(out / "scores.parquet", SCORE_KEYS)
    missing = [method for method in methods if (name, seed, method) not in done]
    known = read_rows(out / "runs.parquet", RUN_KEYS).get((name, seed))
    if not missing or (known is not None and not is_taught(known)):
        return
    directory = train(case, seed, runs / name / f"seed_{seed}")
    records = read_all(directory)
    rigged = find_rigged(name, records)
    states, visits, others = visit_region(directory, seed)
    before, after = measure_tic(directory, states, case.action) if visits else (None, None)
    about = {"records": len(records), "rigged": int(rigged.sum()), "base_rate": float(rigged.mean())}
    about |= {"visits": visits, "probability_first": before, "probability_last": after}
    write_line(out / "runs.parquet", round_numbers(key | about), RUN_KEYS)
    if not is_taught(about):
        return
    began = time.process_time()
    studied = score_studied(directory, records, states, others, case.action) if {*missing} & {*STUDIED} else {}
    together = time.process_time() - began
    for method in missing:
        scores, seconds = (
            (studied[method], together) if method in studied else score(method, directory, records, states, case.action)
        )
        line = key | {"method": method, "seconds": seconds} | judge(scores, rigged)
        write_line(out / "scores.parquet", round_numbers(line), SCORE_KEYS)


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/planted"),
    only: Annotated[str, typer.Option(help="Runs whose name begins so: lander/seed_0.")] = "",
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(METHODS),
) -> None:
    """Run what is not there yet, and write tables.md."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    chosen = methods.split(",")
    if unknown := [method for method in chosen if method not in METHODS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no method; known: {', '.join(METHODS)}.")
    for name, seed in list_jobs(only):
        Console(stderr=True).print(f"{name}, seed {seed}")
        study_run(name, seed, chosen, out, runs)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
