"""How far scores of whole rounds can be trusted: held against training the rounds again, on four environments.

Run: `python -m studies.faithfulness.run results/faithfulness [--only lunarlander-adam/seed_0] [--workers 2]`. Each of
four environments is trained by plain PPO with SGD (LDA's settings, no clipping) and with Stable-Baselines3's default
Adam, on three seeds. An early, a middle and a late round of each are then studied:

- scores against 100 trainings on random halves and on random nine tenths of the records (LDS), with the ceiling that
  the agreement of repeated trainings sets; on seed 0, of halves, the measured test return, too;
- on seed 0, the measured test return without the quarter of the records that a score holds for the best, or the worst.

And every so many rounds the round is trained again without the records that score below 0 (LDA §4.3).

A finished round is not studied again: the command goes on where it was interrupted. Training runs are kept in `--runs`.
The outcome of each training is written with the rest, by order and subset: `whence.lab.rounds.draw_subsets` with
the round's seed draws the subsets again, and another score can be compared with them without a training.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import typer

from studies.faithfulness.retraining import intervene, leave_out, study
from studies.faithfulness.rows import is_written, write_round
from studies.faithfulness.scores import compute_scores
from studies.faithfulness.smoothed import DRAWS, score_smoothed
from studies.shared import Only, Out, Runs, Workers, report, run_jobs
from whence import Return, attribute, lab, stored
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.stored.agents import measure_returns


class Setup(NamedTuple):
    """An environment and optimiser of the study.

    Attributes:
        preset: of the environment.
        studied: an early, a middle and a late round; none where there are interventions only.
        every: how many rounds apart interventions are.
        last: the last round, if it is not a studied one.
    """

    preset: str
    studied: tuple[int, ...]
    every: int
    last: int = 0

    @property
    def recorded(self) -> list[int]:
        """All rounds that are needed."""
        return sorted({*self.studied, *range(self.every, max(self.last, *self.studied, 0) + 1, self.every)})


OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": "Adam", "hyperparameters": {"learning_rate": 3e-4, "max_grad_norm": 0.5}},
}
SETUPS = {
    # Before policies have learned, midway and nearly there, which under Adam comes sooner; later nothing changes.
    ("frozenlake", "sgd"): Setup("lda-code/frozenlake", (3, 12, 18), 2),
    ("frozenlake", "adam"): Setup("lda-code/frozenlake", (2, 5, 9), 1),
    **{("acrobot", optimizer): Setup("lda-code/acrobot", (3, 15, 40), 5) for optimizer in OPTIMIZERS},
    **{("minigrid", optimizer): Setup("lda-code/minigrid", (3, 12, 30), 5) for optimizer in OPTIMIZERS},
    **{("lunarlander", optimizer): Setup("lda-code/lunarlander", (5, 40, 120), 10) for optimizer in OPTIMIZERS},
    ("highway", "sgd"): Setup("lda-code/highway", (), 3, last=30),  # with the paper's dip in round 9
    ("bipedalwalker", "adam"): Setup("lda-code/bipedalwalker", (), 20, last=100),
}
SEEDS = range(3)
SHARES = (0.5, 0.9)
SUBSETS = 100
ORDERS = {"sgd": 2, "adam": 4}
"""Of each half; under SGD orders differ little: four have a ceiling of .988 and more."""

SMOOTHED = f"smoothed, middle half of {DRAWS}"
REMOVED = ("snapshot", "trajectory", "unrolled", SMOOTHED, "advantage")
LEFT_OUT = 0.25

TEST_EPISODES = 100


class Job(NamedTuple):
    """One run of the study."""

    env: str
    optimizer: str
    seed: int

    @property
    def name(self) -> str:
        """Its name in `--only`, and where its training run is below `--runs`."""
        return f"{self.env}-{self.optimizer}/seed_{self.seed}"

    @property
    def setup(self) -> Setup:
        """What is studied of it."""
        return SETUPS[self.env, self.optimizer]

    def chance(self, number: int) -> int:
        """Return a seed of 31 bits for what is drawn in a round, no other seed's."""
        return int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0]) >> 1


def main(out: Out, runs: Runs = Path("out/faithfulness"), only: Only = "", workers: Workers = 2) -> None:
    """Run what is not there yet, of the jobs whose name begins with `only`, several at a time."""
    jobs = [Job(env, optimizer, seed) for seed in SEEDS for env, optimizer in SETUPS]
    run_jobs(study_run, [(job,) for job in jobs if job.name.startswith(only)], out, runs, workers=workers)


def trained(job: Job, runs: Path) -> RunDirectory:
    """Return the run of a job, with its recordings; train it where that is not done."""
    recorded = job.setup.recorded
    config = lab.configure(
        preset=job.setup.preset, seed=job.seed, rounds=recorded[-1], eval_episodes=0, **OPTIMIZERS[job.optimizer]
    )
    lab.run(config, runs / job.name, recordings=recorded)
    return RunDirectory.open(runs / job.name)


def study_run(job: Job, out: Path, runs: Path) -> None:
    """Train a run where that is not done, and study its rounds."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    setup, run = job.setup, trained(job, runs)
    for number in setup.recorded:
        about = {**job._asdict(), "round": number}
        if number in setup.studied and not is_written(out, "round", about):
            write_round(out, "round", about | study_round(run, number, job))
        if not is_written(out, "intervention", about):
            write_round(out, "intervention", about | intervention(run, number, job))
    report(f"{job.name}: {time.perf_counter() - began:.0f} s")


def study_round(run: RunDirectory, number: int, job: Job) -> dict[str, Any]:
    """Hold a round's scores against training it again."""
    seed = job.chance(number)
    model, recording = stored.load_recording(run, number)
    policy, arguments = model.policy, {"target": Return(), "seed": seed}
    scores = compute_scores(policy, recording, **arguments)
    scores[SMOOTHED] = score_smoothed(policy, recording, **arguments).double().numpy()
    rows, removals, outcomes = [], [], {}
    with measure_returns(run, model, number, episodes=TEST_EPISODES, seed=seed) as measure:
        tested = measure if job.seed == 0 else None
        for share, orders, evaluate in zip(SHARES, (ORDERS[job.optimizer], 2), (tested, None), strict=True):
            settings = {"share": share, "count": SUBSETS, "orders": orders, "evaluate": evaluate}
            result = study(policy, recording, scores, **arguments, **settings)
            rows += result.table.with_columns(share=pl.lit(share)).to_dicts()
            outcomes[str(share)] = {
                truth: {name: values.tolist() for name, values in by_name.items()}
                for truth, by_name in result.outcomes.items()
            }
        if tested is not None:
            chosen, settings = {name: scores[name] for name in REMOVED}, {"share": LEFT_OUT, "orders": 2}
            removals = leave_out(policy, recording, chosen, evaluate=tested, **settings, **arguments).to_dicts()
    return {"lds": rows, "removals": removals, "outcomes": outcomes}


def intervention(run: RunDirectory, number: int, job: Job) -> dict[str, Any]:
    """Train a round again without the records that score below 0, and without as many at random."""
    seed = job.chance(number)
    model, recording = stored.load_recording(run, number)
    scored = attribute(model.policy, recording.records, target=Return(), objective=model_objective(model))
    with measure_returns(run, model, number, episodes=2 * TEST_EPISODES, seed=seed) as measure:
        rows = intervene(model.policy, recording, scored.scores, evaluate=measure, seed=seed)
    return {"interventions": rows.to_dicts()}


if __name__ == "__main__":
    typer.run(main)
