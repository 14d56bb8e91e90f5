"""Whether a target without the divergence penalty helps by more than by discarding the penalty.

Run: `python -m studies.selection.penalty results/selection`. Dr. Post-Training reports that IIF lowers toxicity further
if its target is the average reward, free of the divergence that PPO is charged for, and not the return. Dropping what
lowers that target may just undo the penalty, as a smaller coefficient does. PPO trains the laboratory `arithmetic`:
with the penalty, with smaller ones and with none; with IIF by the return and by the reward; and with as many responses
dropped at random. A round's responses are to new prompts, so its mean reward and divergence are measurements. Arms are
compared at the end, and with plain PPO's penalties at as large a divergence.

A finished run is not trained again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import typer

from studies.shared import (
    Out,
    Row,
    Runs,
    Workers,
    mean_cell,
    read_list,
    report,
    run_jobs,
    table,
    write_line,
    write_page,
)
from whence import NonPositive, RandomDrop
from whence.experiments import read_rows
from whence.experiments.llm.language_config import task_settings
from whence.experiments.llm.loading import load_model
from whence.llm import PPOConfig, PPOTrainer, SequenceReturn, SequenceReward
from whence.llm.lab import arithmetic
from whence.runs import RunDirectory

SEEDS, SIZE, ROUNDS, LAST = range(5), "small", 15, 3
PENALTY = 0.1
PENALTIES = {"none": PENALTY, "a third of the penalty": PENALTY / 3, "a tenth": PENALTY / 10, "no penalty": 0.0}
CHOICES = {
    "iif, return": (NonPositive(), SequenceReturn()),
    "iif, reward": (NonPositive(), SequenceReward()),
    "random, as many as iif, reward": (RandomDrop(1.0, zeros=True), SequenceReward()),
}
KEYS = ("arm", "seed")


def train(arm: str, seed: int, out: Path, runs: Path) -> None:
    """Train an arm, and write a line: rewards, divergences and kept shares of its rounds."""
    torch.set_num_threads(1)
    lab = arithmetic(size=SIZE, progress=False)
    model, tokenizer = load_model(str(lab.model_path), "float32")
    settings = {**task_settings("arithmetic", SIZE, "ppo"), "rounds": ROUNDS, "eval_every": 0, "seed": seed}
    settings |= {"init_kl_coef": PENALTIES.get(arm, PENALTY), "adap_kl_ctrl": False}
    path = runs / arm.replace(", ", "-").replace(" ", "-") / str(seed)
    config = PPOConfig(str(path), max_new_tokens=lab.max_new_tokens, **settings)
    rule, target = CHOICES.get(arm, (None, None))
    begun = time.process_time()
    PPOTrainer(config, model, tokenizer, lab.reward, lab.train, rule=rule, target=target, select="before").train(
        overwrite=True
    )
    seconds = time.process_time() - begun
    metrics = RunDirectory.open(path).table("metrics")
    line = {"arm": arm, "seed": seed, "seconds": seconds, "rewards": metrics["reward"].to_list()}
    line |= {"divergences": metrics["kl"].to_list(), "kept": (1 - metrics["dropped_share"]).to_list()}
    write_line(out / "penalty.parquet", line, KEYS)
    report(f"{arm}, seed {seed}")


def average_end(values: Sequence[float]) -> float:
    """Return the mean of the last rounds."""
    return mean(values[-LAST:])


def read_frontier(runs: Mapping[str, Row], divergence: float) -> float:
    """Return the reward that plain PPO ends with at a divergence, between its penalties or at the nearest."""
    ends = sorted((average_end(runs[arm]["divergences"]), average_end(runs[arm]["rewards"])) for arm in PENALTIES)
    return float(np.interp(divergence, *zip(*ends, strict=True)))


def write_tables(out: Path) -> None:
    """Write penalty.md: means over seeds with 95% t intervals; differences are between runs of a seed."""
    seeds: dict[int, dict[str, Row]] = {}
    for run in read_list(out / "penalty.parquet", KEYS):
        seeds.setdefault(run["seed"], {})[run["arm"]] = run
    whole = [runs for runs in seeds.values() if len(runs) == len(PENALTIES) + len(CHOICES)]
    lines = [["", "reward at the end", "minus none", "divergence", "minus plain PPO at that divergence", "kept"]]
    for arm in (*PENALTIES, *CHOICES) if whole else ():
        rewards, divergences = ([average_end(runs[arm][n]) for runs in whole] for n in ("rewards", "divergences"))
        plain = [average_end(runs["none"]["rewards"]) for runs in whole]
        frontier = [read_frontier(runs, divergence) for runs, divergence in zip(whole, divergences, strict=True)]
        gains, beyond = (mean_cell([*np.subtract(rewards, others)]) for others in (plain, frontier))
        kept = mean_cell([mean(runs[arm]["kept"]) for runs in whole])
        cells = [mean_cell(rewards), "" if arm == "none" else gains, mean_cell(divergences)]
        lines.append([arm, *cells, beyond if arm in CHOICES else "", kept])
    command = "`python -m studies.selection.penalty results/selection`"
    head = f"# Choosing and the divergence penalty: tables\n\nWritten by {command}, {len(whole)} seeds."
    write_page(out / "penalty.md", head, table(lines))


def main(out: Out, runs: Runs = Path("out/penalty"), workers: Workers = 1) -> None:
    """Train what is not there yet, seed by seed, and write penalty.md."""
    arithmetic(size=SIZE, progress=False)
    stored = read_rows(out / "penalty.parquet", KEYS)
    jobs = [(arm, seed) for seed in SEEDS for arm in (*PENALTIES, *CHOICES) if (arm, seed) not in stored]
    run_jobs(train, jobs, out, runs, workers=workers)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
