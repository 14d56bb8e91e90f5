"""What scoring costs beside the alternatives: engines, training, other libraries, and whole rounds.

Run: `python -m studies.benchmarks.run results/benchmarks [--only mlp/ghost/2048] [--device cuda] [--repeats 5]`. One
torch thread. What is compared takes turns in one process. Each finished cell is a line of cells.parquet, and is not
measured again; `--list` shows the cells. Two processes may measure different cells at a time, such as `--only
engines,training` and `--only peers,rounds`. Tables: `python -m studies.benchmarks.tables results/benchmarks`.

- engines, `POLICY/ENGINE/RECORDS`: all of `attribute(..., memory=...)`, and one plain forward and backward pass over
  the same records. What would take over a minute, or more memory than is free, is estimated from fewer records.
- training, `training/POLICY/ENGINE`: scoring over SB3's `train()`; its memory over a training step's; ten targets.
- peers, `peers/POLICY/LIBRARY`: the same scores by other libraries.
- steps, `steps/POLICY`: a training pass of a language model, plain, and with scores made in it.
- operations, `operations/POLICY`: floating-point operations of scoring a language model's rows.
- errors, `errors/WORLD`: scoring a rollout with errors and without.
- rounds, `rounds/WORLD`: whole rounds of training, with scoring and without it.
"""

import typer

from studies.benchmarks import engines, peers, rounds
from studies.benchmarks.cells import Cell, make_command


def list_cells() -> list[Cell]:
    """Return all cells, in the order in which they are measured."""
    return [cell for section in (engines, peers, rounds) for cell in section.list_cells()]


main = make_command(list_cells, "results/benchmarks")

if __name__ == "__main__":
    typer.run(main)
