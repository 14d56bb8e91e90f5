"""What choosing costs on language models, in the step and before the steps, next to plain PPO and TRL's GRPO.

Run: `python -m studies.scoring.run results/scoring [--only ppo/1M] [--repeats 5] [--device cuda]`. One torch thread.
All ways of a cell take turns in one process, and a way's cost is its time over the plain one's in the same turn. Each
finished cell is a line of cells.parquet, and is not measured again; `--list` shows the cells. Tables: `python -m
studies.scoring.tables results/scoring`.

- `TRAINER/SIZE/BATCH/EPOCHS`: seconds of a round of 64 responses in passes of BATCH rows, by stage.
- `memory/TRAINER/SIZE/BATCH`: the most memory of a training of one epoch.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import typer

from studies.benchmarks.cells import Cell, Result, Setting, make_command
from studies.benchmarks.timing import measure_peak, spread
from studies.scoring.trainings import STAGES, WAYS, Way, train_grpo, train_ppo

TRAINERS: dict[str, Callable[[str, int, int, Way, str], dict[str, float]]] = {
    "ppo": train_ppo,
    "grpo": train_grpo,
    "grpo-whole": partial(train_grpo, checkpointing=False),
}
"""`grpo` with gradient checkpointing, which is TRL's default; `grpo-whole` without."""

SIZES, BATCHES, EPOCHS = ("1M", "10M", "100M"), (16, 64), (1, 4)


def list_cells() -> list[Cell]:
    """Return all cells, in the order in which they are measured."""
    cells = [
        Cell(f"{trainer}/{size}/{batch}/{epochs}", trainer, partial(measure_seconds, trainer, size, batch, epochs))
        for size, trainer, batch, epochs in product(SIZES, TRAINERS, BATCHES, EPOCHS)
    ]
    for size, trainer, batch in product(SIZES, TRAINERS, BATCHES):
        cells.append(Cell(f"memory/{trainer}/{size}/{batch}", "memory", partial(measure_memory, trainer, size, batch)))
    return cells


def measure_seconds(trainer: str, size: str, batch: int, epochs: int, setting: Setting) -> Result:
    """Return the seconds of each way's stages, and its round without generation over the plain one's, turn by turn."""
    turns = [
        {way.name: TRAINERS[trainer](size, batch, epochs, way, setting.device) for way in WAYS}
        for _ in range(setting.repeats)
    ]
    stages = {way.name: {stage: spread([turn[way.name][stage] for turn in turns]) for stage in STAGES} for way in WAYS}
    ratios = {way.name: spread([_compare_with_plain(turn, way) for turn in turns]) for way in WAYS}
    seconds = spread([sum(turn["plain"].values()) for turn in turns])
    return {"seconds": seconds, "stages": stages, "ratio": ratios}


def _compare_with_plain(turn: dict[str, dict[str, float]], way: Way) -> float:
    """Return the seconds of scoring and of the steps over those of plain steps."""
    stages, plain = turn[way.name], turn["plain"]
    # TRL's trainers score before the steps in what counts as their generation.
    scoring = stages["scoring"] + stages["generation"] - plain["generation"]
    return (stages["optimisation"] + scoring) / plain["optimisation"]


def measure_memory(trainer: str, size: str, batch: int, setting: Setting) -> Result:
    """Return the most bytes of a training of one epoch, by way."""

    def measure_way(way: Way) -> dict[str, int | None]:
        return measure_peak(partial(TRAINERS[trainer], size, batch, 1, way, setting.device), setting.device)

    return {"bytes": {way.name: measure_way(way) for way in WAYS if way.share in (0, 0.5)}}


main = make_command(list_cells, "results/scoring")

if __name__ == "__main__":
    typer.run(main)
