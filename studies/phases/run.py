"""Do LDA's three phases appear in the roughness of influence, and in that of permuted scores as well (LDA §4.2, C.2)?

Run: `python -m studies.phases.run results/phases [--only acrobot/seed_0]`. PPO of the presets `lda-code/*` is trained
on Acrobot, Highway and MiniGrid, three seeds each, without evaluation. In each run the three behaviours that training
raised most are found and traced over all rounds: `whence phases RUN --find 3`. One process, one torch thread.

- A behaviour's phases are the segments that fit the roughness over rounds best; LDA's three appear if its level falls
  twice. The same is done with 20 curves of scores permuted over the same records, and with roughness over their mean.
- Highway is collected in EnvPool, as its preset has it: Gymnasium's makes 30 steps a second.

Each finished run is a row of `runs.parquet`; a run that has one is not done again. `tables.md` is made anew at the
end. Runs are kept in `--runs`; delete one to train it again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from studies.markdown import table
from studies.stored import round_numbers
from whence import experiments
from whence.diagnosis.behaviours import find_behaviours
from whence.diagnosis.phase_summary import summarise_history
from whence.diagnosis.phases import trace_phases
from whence.experiments.rl.labels import action_labels
from whence.experiments.rowfile import put_row, read_rows
from whence.guards import write_atomically
from whence.runs import RunDirectory
from whence.runs.files import lock_directory

ENVIRONMENTS = ("acrobot", "highway", "minigrid")
SEEDS = 3
BEHAVIOURS = 3
KEYS = ("env", "seed")
CURVES = ("round", "log_prob", "nodes", "roughness", "expected", "low", "high", "relative", "association", "nearness")

TOP_RECORDS = """Top records: of each round's 20 highest, by phase, the share that took the action with a normalised
advantage above 0 or another with one below 0; and the share of the round's records that are farther from the
behaviour's state."""


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/phases/runs"),
    only: Annotated[str, typer.Option(help="Runs whose name begins so: acrobot/seed_0.")] = "",
) -> None:
    """Train and trace what is not there yet, then tabulate and draw all that is."""
    torch.set_num_threads(1)
    console = Console(stderr=True)
    for env, seed in ((env, seed) for seed in range(SEEDS) for env in ENVIRONMENTS):
        name = f"{env}/seed_{seed}"
        if not name.startswith(only) or (env, seed) in read_rows(out / "runs.parquet", KEYS):
            continue
        began = time.process_time()
        content = {"env": env, "seed": seed, "histories": study_run(env, seed, runs / name)}
        with lock_directory(out, wait=True):
            put_row(out / "runs.parquet", round_numbers(content), KEYS)
        console.print(f"{name}: {time.process_time() - began:.0f} s of CPU")
    lines = list(read_rows(out / "runs.parquet", KEYS).values())
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text(make_tables(lines), encoding="utf-8")
    draw_curves(lines, out / "curves.png")


def study_run(env: str, seed: int, path: Path, **overrides: Any) -> list[dict[str, Any]]:
    """Train a run if that is not done, and return its behaviours' histories."""
    config = experiments.configure(preset=f"lda-code/{env}", arm="ppo", seed=seed, eval_episodes=0, **overrides)
    experiments.run(config, path)
    run = RunDirectory.open(path)
    histories = trace_phases(run, find_behaviours(run, BEHAVIOURS))
    labels = action_labels(config.env)
    return [_shorten(summarise_history(history, labels)) for history in histories]


def _shorten(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a summary: no moments, and only the columns that tables and figures show."""
    names = ("behaviour", "sentences", "pattern", "permuted_patterns", "relative_phases", "preference")
    phases = [{name: value for name, value in phase.items() if name != "moments"} for phase in summary["phases"]]
    rounds = {name: summary["rounds"][name] for name in CURVES}
    return {**{name: summary[name] for name in names}, "phases": phases, "rounds": rounds}


def make_tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of environments and one of all behaviours, in Markdown."""
    parts = ["# Phases of roughness", "## By environment", _tabulate_environments(lines), "## By behaviour"]
    parts += [_tabulate_behaviours(lines), TOP_RECORDS]
    return "\n\n".join(parts) + "\n"


def _tabulate_environments(lines: Sequence[Mapping[str, Any]]) -> str:
    head = ["environment", "runs", "behaviours", "three phases", "one fall", "permuted: three phases", "permuted: same"]
    rows = [head]
    for env in ENVIRONMENTS:
        histories = [history for line in lines if line["env"] == env for history in line["histories"]]
        if not histories:
            continue
        counts = [_count_permuted(history) for history in histories]
        patterns = [history["pattern"] for history in histories]
        rows.append(
            [
                *(env, str(sum(line["env"] == env for line in lines)), str(len(histories))),
                *(f"{patterns.count(name)} of {len(patterns)}" for name in ("three phases", "one fall")),
                *(f"{np.mean([count[at] for count in counts]):.0%}" for at in (0, 1)),
            ]
        )
    return table(rows)


def _count_permuted(history: Mapping[str, Any]) -> tuple[float, float]:
    """Return the shares of permuted curves that have three phases, and that have the pattern of the real curve."""
    counts = history["permuted_patterns"]
    total = sum(counts.values())
    return counts.get("three phases", 0) / total, counts.get(history["pattern"], 0) / total


def _tabulate_behaviours(lines: Sequence[Mapping[str, Any]]) -> str:
    head = [
        "run",
        "behaviour",
        "π(a\\|s)",
        "roughness by phase",
        "permuted: same",
        "over permuted, by phase",
        "top records",
    ]
    rows = [
        [
            *(f"{line['env']}/seed_{line['seed']}", history["behaviour"]["name"]),
            f"{history['preference'][0]:.2f} → {history['preference'][-1]:.2f}",
            _list_levels(history["phases"], "roughness"),
            f"{_count_permuted(history)[1]:.0%}",
            _list_levels(history["relative_phases"], "relative"),
            ", ".join(f"{phase['association']:.0%} / {phase['nearness']:.0%}" for phase in history["phases"]),
        ]
        for line in lines
        for history in line["histories"]
    ]
    return table([head, *rows])


def _list_levels(phases: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(f"{phase[name]:.2g} ({phase['first']}–{phase['last']})" for phase in phases)


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each run's first behaviour: probability, roughness with permuted scores, and the one over the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.6 * len(lines)), dpi=80, layout="constrained")
    axes = figure.subplots(len(lines), 3, squeeze=False)
    for row, line in zip(axes, lines, strict=True):
        history = line["histories"][0]
        rounds, numbers = history["rounds"], history["rounds"]["round"]
        columns = {name: np.array(rounds[name], float) for name in CURVES}
        row[0].plot(range(1, len(history["preference"]) + 1), history["preference"], color="#2f74e6")
        row[0].set(ylim=(0, 1.03), title=f"{line['env']}, seed {line['seed']}: π({history['behaviour']['name'][:24]})")
        row[1].fill_between(numbers, columns["low"], columns["high"], color="#7d8590", alpha=0.3, linewidth=0)
        row[1].plot(numbers, columns["expected"], color="#7d8590", linestyle=":", label="permuted scores")
        row[1].plot(numbers, columns["roughness"], color="#e27411", label="roughness")
        row[1].set(ylim=(0, None), title="roughness")
        row[1].legend(frameon=False)
        row[2].axhline(1, color="#7d8590", linestyle=":")
        row[2].plot(numbers, columns["relative"], color="#1ba764")
        row[2].set(ylim=(0, None), title="roughness / permuted")
    FigureCanvasAgg(figure)
    with write_atomically(path) as temporary:
        figure.savefig(temporary, format="png")


if __name__ == "__main__":
    typer.run(main)
