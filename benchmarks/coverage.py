"""How often the interval of a score holds the truth: `python -m benchmarks.coverage`.

One policy is fixed and many rollouts are collected with it. Records of a few of them are scored, each with its error
over the folds of its own rollout. The truth is the score by the target's gradient over all other rollouts.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from scipy import stats

from whence import RecordBatch, Return, attribute
from whence.experiments import configure, run
from whence.experiments.rl.stored import load_model
from whence.folds import balance_folds, count_folds, number_episodes
from whence.guards import write_atomically
from whence.intervals import t_interval
from whence.runs import RunDirectory
from whence.sb3 import collect, model_objective

FOLDS = 8
STAGES = (10, 40)
"""The rounds whose policies are fixed."""


def measure_coverage(model: Any, rollouts: Sequence[RecordBatch], scored: int) -> dict[str, Any]:
    """Return the share of records whose interval holds the truth, for the first `scored` rollouts."""
    shares: dict[str, list[float]] = {"t": [], "two_errors": []}
    significant, episodes = [], []
    for number in track(range(scored), description="scoring"):
        records = rollouts[number]
        others = concatenate([rollout for place, rollout in enumerate(rollouts) if place != number])

        def truth_target(view: Any, params: Any, records: RecordBatch, others: RecordBatch = others) -> torch.Tensor:
            return Return()(view, params, others)

        settings = {"objective": model_objective(model)}
        influence = attribute(model.policy, records, target=Return(), folds=FOLDS, **settings)
        truth = attribute(model.policy, records, target=truth_target, **settings).scores
        counted = count_folds(balance_folds(records, FOLDS), number_episodes(records)).sum(dim=0)
        quantile = torch.as_tensor(stats.t.ppf(0.975, counted.numpy() - 1))
        distance = (influence.scores - truth).abs() / influence.errors
        shares["t"].append(float((distance <= quantile).double().mean()))
        shares["two_errors"].append(float((distance <= 2).double().mean()))
        significant.append(float(influence.is_significant().double().mean()))
        episodes.append(len(records.episode_ids.unique()))
    return {
        **{name: {**t_interval(values), "per_rollout": values} for name, values in shares.items()},
        "significant_share": t_interval(significant),
        "episodes_of_a_rollout": sum(episodes) / len(episodes),
    }


def concatenate(batches: Sequence[RecordBatch]) -> RecordBatch:
    """Return several rollouts' records as one batch, for a target."""
    names = ("observations", "actions", "log_probs", "advantages")
    return RecordBatch(**{name: torch.cat([getattr(batch, name) for batch in batches]) for name in names})


def main(
    rollouts: Annotated[int, typer.Option(help="Rollouts of 2,048 steps of each policy.")] = 100,
    scored: Annotated[int, typer.Option(help="How many of them are scored.")] = 20,
    seed: Annotated[int, typer.Option(help="Of training and of rollouts.")] = 0,
    work: Annotated[Path, typer.Option(help="Where the run that is trained first is kept.")] = Path("out/coverage"),
    out: Annotated[Path, typer.Option(help="The file of figures.")] = Path("results/errors/summary.json"),
) -> None:
    """Measure the coverage of the intervals of scores on LunarLander, early and late in training."""
    torch.set_num_threads(1)
    config = configure(env="LunarLander-v3", arm="ppo", rounds=max(STAGES), eval_episodes=0, seed=seed)
    run(config, work)
    summary: dict[str, Any] = {
        "rollouts": rollouts,
        "scored": scored,
        "seed": seed,
        "folds": FOLDS,
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "rounds": {},
    }
    for number in STAGES:
        model = load_model(RunDirectory.open(work), number)
        model.set_random_seed(seed + number)
        batches = [collect(model) for _ in track(range(rollouts), description=f"round {number}")]
        summary["rounds"][str(number)] = measure_coverage(model, batches, scored)
        out.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(out) as temporary:
            temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
