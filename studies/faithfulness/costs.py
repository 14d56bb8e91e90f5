"""What scores of a whole round cost, and what training it again without records does, in trainings by SB3.

Run: `python -m studies.faithfulness.costs [OUT] [--repeats 5] [--device cuda]`. One process, one torch thread, CPU
seconds of the process, on a GPU those of the clock; the things compared take turns, and medians of their ratios are
printed with the lowest and the highest, and written to OUT/costs.json where a directory is given. The third round of
PPO on LunarLander-v3 (2,048 records, MLP 64x64, 10 epochs of minibatches of 64) is recorded, under SGD as LDA has it
and under SB3's default Adam; one SB3 `train()` of that round is what everything is measured by.

- "snapshot", "crossfit": `attribute` and `attribute_crossfit` of its records, at the policy as the round left it, which
  costs the same.
- "smoothed": `score_smoothed`; the other scores: `attribute_round`; "three in one walk": trajectory, optimizer and
  optimizer-momentum together.
- "100 trainings": `retrain` on 100 random halves along the recorded minibatches, over 100 times one call of `train()`.
"""

import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from studies.benchmarks.timing import check_device, count_seconds
from studies.faithfulness.run import OPTIMIZERS, write
from studies.faithfulness.smoothed import score_smoothed
from whence import KeepAll, Return, attribute, attribute_crossfit, attribute_round, experiments
from whence.counterfactual import draw_subsets, retrain
from whence.experiments.rl.environments import make_training_env
from whence.experiments.rl.training import make_model
from whence.rounds import METHODS, RoundRecording
from whence.sb3 import InfluenceCallback, model_objective, replay_round

PRODUCTS = ("trajectory", "optimizer", "optimizer-momentum")
"""Scores that share the target's gradient at every step."""


def main(
    out: Annotated[
        Path | None, typer.Argument(help="The directory of the results; none: they are printed only.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often each is measured.", min=1)] = 5,
    device: Annotated[str, typer.Option(help="Where it is computed: cpu or cuda.")] = "cpu",
) -> None:
    """Measure, print and keep."""
    torch.set_num_threads(1)
    check_device(device)
    table = Table(title=f"CPU time, in trainings of the round ({platform.machine()}, {repeats} repeats)")
    table.add_column("what")
    costs = {}
    for name, settings in OPTIMIZERS.items():
        table.add_column(f"{name}: median [lowest, highest]")
        model, recording = _record_round(settings, device)
        ratios = _measure_ratios(model, recording, repeats, name, device)
        costs[name] = {
            what: {"median": statistics.median(r), "low": min(r), "high": max(r)} for what, r in ratios.items()
        }
    for what in costs["sgd"]:
        cells = (column[what] for column in costs.values())
        table.add_row(what, *(f"{c['median']:.3g} [{c['low']:.3g}, {c['high']:.3g}]" for c in cells))
    Console(width=100).print(table)
    if out is not None:
        write(out / "costs.json", {"machine": platform.platform(), "repeats": repeats, "costs": costs})


def _record_round(settings: Mapping[str, Any], device: str) -> tuple[Any, RoundRecording]:
    config = experiments.configure(preset="lda-code/lunarlander", eval_episodes=0, device=device, **settings)
    torch.manual_seed(config.seed)
    model = make_model(config, make_training_env(config))
    callback = InfluenceCallback(KeepAll(), recordings=[3])
    model.learn(3 * model.n_steps, callback=callback)
    assert callback.recording is not None
    return model, callback.recording


def _measure_ratios(
    model: Any, recording: RoundRecording, repeats: int, name: str, device: str
) -> dict[str, list[float]]:
    policy, records, target = model.policy, recording.records, Return()
    objective = model_objective(model)
    kept = draw_subsets(len(records), 0.5, 100, torch.Generator().manual_seed(0))
    measured: dict[str, Callable[[], object]] = {
        "snapshot": lambda: attribute(policy, records, target=target, objective=objective),
        "crossfit": lambda: attribute_crossfit(policy, records, target=target, objective=objective),
        **{
            method: lambda method=method: attribute_round(policy, recording, target=target, method=method)
            for method in METHODS
        },
        "smoothed": lambda: score_smoothed(policy, recording, target=target),
        "three in one walk": lambda: attribute_round(policy, recording, method=PRODUCTS, target=target),
        "100 trainings": lambda: retrain(policy, recording, kept),
    }
    ratios: dict[str, list[float]] = {what: [] for what in measured}
    for _ in track(range(repeats), name):
        for what, run in measured.items():
            # Next to each measurement, so that a busy machine slows both alike.
            plain = count_seconds(lambda: replay_round(model, recording), device)
            ratios[what].append(count_seconds(run, device) / plain / (100 if what == "100 trainings" else 1))
    return ratios


if __name__ == "__main__":
    typer.run(main)
