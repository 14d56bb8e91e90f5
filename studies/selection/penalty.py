"""Whether a target without the divergence penalty helps by more than by discarding the penalty.

Run: `python -m studies.selection.penalty results/selection`. Dr. Post-Training reports that IIF lowers toxicity further
if its target is the average reward, free of the divergence that PPO is charged for, and not the return. Dropping what
lowers that target may just undo the penalty, as a smaller coefficient does. PPO trains the laboratory `arithmetic`:
with the penalty, with smaller ones and with none; with IIF by the return and by the reward; and with as many responses
dropped at random. A round's responses are to new prompts, so its mean reward and divergence are measurements. Arms are
compared at the end, and with plain PPO's penalties at as large a divergence.

A finished run is not trained again.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from studies.markdown import cell, table
from studies.stored import round_numbers, write_line
from whence import NonPositive, RandomDrop
from whence.core import write_atomically
from whence.lab import read_rows
from whence.lab.language import arithmetic
from whence.llm import PPOConfig, PPOTrainer, SequenceReturn, SequenceReward
from whence.runs import RunDirectory
from whence.statistics import t_interval
from whence.stored.language.language_config import task_settings
from whence.stored.language.loading import load_language_model

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
    model, tokenizer = load_language_model(str(lab.model_path), "float32")
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
    write_line(out / "penalty.parquet", round_numbers(line), KEYS)
    Console(stderr=True).print(f"{arm}, seed {seed}")


def average_end(values: Sequence[float]) -> float:
    """Return the mean of the last rounds."""
    return mean(values[-LAST:])


def read_frontier(runs: Mapping[str, Mapping[str, Any]], divergence: float) -> float:
    """Return the reward that plain PPO ends with at a divergence, between its penalties or at the nearest."""
    ends = sorted((average_end(runs[arm]["divergences"]), average_end(runs[arm]["rewards"])) for arm in PENALTIES)
    return float(np.interp(divergence, *zip(*ends, strict=True)))


def write_tables(out: Path) -> None:
    """Write penalty.md: means over seeds with 95% t intervals; differences are between runs of a seed."""
    seeds: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in read_rows(out / "penalty.parquet", KEYS).values():
        seeds.setdefault(run["seed"], {})[run["arm"]] = run
    whole = [runs for runs in seeds.values() if len(runs) == len(PENALTIES) + len(CHOICES)]
    lines = [["", "reward at the end", "minus none", "divergence", "minus plain PPO at that divergence", "kept"]]
    for arm in (*PENALTIES, *CHOICES) if whole else ():
        rewards = [average_end(runs[arm]["rewards"]) for runs in whole]
        gains = [reward - average_end(runs["none"]["rewards"]) for reward, runs in zip(rewards, whole, strict=True)]
        divergences = [average_end(runs[arm]["divergences"]) for runs in whole]
        pairs = zip(rewards, divergences, whole, strict=True)
        beyond = [reward - read_frontier(runs, divergence) for reward, divergence, runs in pairs]
        kept = [mean(runs[arm]["kept"]) for runs in whole]
        cells = [show(rewards), "" if arm == "none" else show(gains), show(divergences)]
        lines.append([arm, *cells, show(beyond) if arm in CHOICES else "", show(kept)])
    command = "`python -m studies.selection.penalty results/selection`"
    text = f"# Choosing and the divergence penalty: tables\n\nWritten by {command}, {len(whole)} seeds.\n\n"
    with write_atomically(out / "penalty.md") as temporary:
        temporary.write_text(text + table(lines) + "\n", encoding="utf-8")


def show(values: Sequence[float]) -> str:
    """Return a mean with its interval."""
    return cell(t_interval(values))


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/penalty"),
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
) -> None:
    """Train what is not there yet, seed by seed, and write penalty.md."""
    arithmetic(size=SIZE, progress=False)
    stored = read_rows(out / "penalty.parquet", KEYS)
    jobs = [(arm, seed) for seed in SEEDS for arm in (*PENALTIES, *CHOICES) if (arm, seed) not in stored]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for begun in [pool.submit(train, *job, out, runs) for job in jobs]:
            begun.result()
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
