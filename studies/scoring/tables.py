"""Tables of what choosing costs, from the cells that `studies.scoring.run` measured.

Run: `python -m studies.scoring.tables results/scoring`, which writes tables.md.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import typer

from studies.benchmarks.cells import read_results
from studies.benchmarks.subjects import MIB
from studies.scoring.run import BATCHES, EPOCHS, SIZES, TRAINERS
from studies.scoring.trainings import WAYS
from studies.shared import Out, table, write_page

NAMES = {"ppo": "PPO", "grpo": "GRPO", "grpo-whole": "GRPO without gradient checkpointing"}


def show_ratio(spread: Mapping[str, float]) -> str:
    """Return a ratio's median, lowest and highest."""
    return f"{spread['median']:.2f} [{spread['low']:.2f}, {spread['high']:.2f}]"


def list_ratios(cells: Mapping[str, Any], trainer: str) -> Iterator[list[str]]:
    """Yield the lines of a trainer's table: scoring and steps over the plain training's steps."""
    ways = [way.name for way in WAYS if way.select is not None]
    yield ["parameters, rows of a pass, epochs", "s, plain", *ways]
    for size, batch, epochs in product(SIZES, BATCHES, EPOCHS):
        if (cell := cells.get(f"{trainer}/{size}/{batch}/{epochs}")) is not None:
            plain = cell["stages"]["plain"]["optimisation"]["median"]
            yield [f"{size}, {batch}, {epochs}", f"{plain:.3g}", *(show_ratio(cell["ratio"][way]) for way in ways)]


def list_steps(cells: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of whole steps of GRPO with one iteration, next to TRL's generation and training."""
    yield ["trainer, parameters, rows of a pass", "TRL: generation", "TRL: training", "half dropped: all", "of TRL's"]
    for trainer, size, batch in product(("grpo", "grpo-whole"), SIZES, BATCHES):
        if (cell := cells.get(f"{trainer}/{size}/{batch}/1")) is not None:
            plain, chosen = (_take_medians(cell, way) for way in ("plain", "in_step, 0.5"))
            whole = sum(chosen.values())
            figures = plain["generation"], plain["optimisation"], whole
            share = f"{whole / sum(plain.values()):.2f}"
            yield [f"{NAMES[trainer]}, {size}, {batch}", *(f"{figure:.3g}" for figure in figures), share]


def _take_medians(cell: Mapping[str, Any], way: str) -> dict[str, float]:
    return {stage: spread["median"] for stage, spread in cell["stages"][way].items()}


def list_memory(cells: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of memory: MiB in tensors at the most, and how many times those of the plain training."""
    ways = [way.name for way in WAYS if way.share in (0, 0.5)]
    yield ["trainer, parameters, rows of a pass", *ways]
    for trainer, size, batch in product(TRAINERS, SIZES, BATCHES):
        if (cell := cells.get(f"memory/{trainer}/{size}/{batch}")) is not None:
            figures = {way: cell["bytes"][way]["tensors"] for way in ways}
            texts = [f"{figures[way] / MIB:,.0f} ({figures[way] / figures['plain']:.2f})" for way in ways]
            yield [f"{NAMES[trainer]}, {size}, {batch}", *texts]


def write_tables(out: Out) -> None:
    """Write tables.md."""
    parts = ["# What choosing costs on language models"]
    for device, cells in read_results(out).items():
        parts.append(f"## {device}")
        for trainer in TRAINERS:
            about = "scoring and steps over the plain training's steps; median [lowest, highest] of turns."
            parts.append(f"{NAMES[trainer]}: {about} A way's number is the share of rows that it drops.")
            parts.append(table([*list_ratios(cells, trainer)]))
        parts.append("A step of GRPO with one iteration, in seconds, with generation and rewards:")
        parts.append(table([*list_steps(cells)]))
        parts.append("The most memory of a training in tensors, MiB, and over the plain one's:")
        parts.append(table([*list_memory(cells)]))
    write_page(out / "tables.md", *parts)


if __name__ == "__main__":
    typer.run(write_tables)
