"""What scoring costs beside the alternatives: engines, training, other libraries, whole rounds, and installing.

Run: `python -m studies.benchmarks.run results/benchmarks [--only mlp/ghost/2048] [--device cuda] [--repeats 5]`. One
torch thread. What is compared takes turns in one process. Each finished cell is a line of cells.parquet, and is not
measured again; `--list` shows the cells. Two processes may measure different cells at a time, such as `--only
engines,training` and `--only peers,rounds,install`. Tables: `python -m studies.benchmarks.tables results/benchmarks`.

- engines, `POLICY/ENGINE/RECORDS`: all of `attribute(..., memory=...)`, and one plain forward and backward pass over
  the same records. What would take over a minute, or more memory than is free, is estimated from fewer records.
- training, `training/POLICY/ENGINE`: scoring over SB3's `train()`; its memory over a training step's; ten targets.
- peers, `peers/POLICY/LIBRARY`: the same scores by other libraries.
- errors, `errors/WORLD`: scoring a rollout with errors and without.
- rounds, `rounds/WORLD`: whole rounds of training, with scoring and without it.
- install, `install/...`: from `pip install` to the first result.
"""

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from studies.benchmarks import engines as suite_engines
from studies.benchmarks import install as suite_install
from studies.benchmarks import peers as suite_peers
from studies.benchmarks import rounds as suite_rounds
from studies.benchmarks.cells import Cell, Setting, choose, read_results, write_result
from studies.benchmarks.timing import check_device
from whence.core import WhenceError


def list_cells() -> list[Cell]:
    """Return all cells, in the order in which they are measured."""
    sections = suite_engines, suite_peers, suite_rounds, suite_install
    return [cell for section in sections for cell in section.list_cells()]


def measure(out: Path, cells: list[Cell], device: str, repeats: int) -> None:
    """Measure the cells that are not finished, and write a line of each."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor()
    about = {"machine": name or platform.machine(), "torch": version("torch")}
    for place, cell in enumerate(cells, start=1):
        results = read_results(out).get(device, {})
        if cell.name in results:
            continue
        start = time.perf_counter()
        result = cell.measure(Setting(device, repeats, results))
        if "skipped" in result:  # no result: it is measured where it can be
            print(f"[{place}/{len(cells)}] {cell.name}: {result['skipped']}", flush=True)
            continue
        took = round(time.perf_counter() - start, 1)
        line = write_result(out, device, cell, {**result, **about, "took": took})
        print(f"[{place}/{len(cells)}] {cell.name}: {describe(line)} ({took:g} s)", flush=True)


def describe(line: dict) -> str:
    """Return a cell's result in a few words."""
    if "refused" in line:
        return f"refused: {line['refused']}"
    seconds = line.get("seconds", {}).get("median")
    return "done" if seconds is None else f"{'~' if 'estimated' in line else ''}{seconds:.3g} s"


def measure_chosen(
    cells: list[Cell], out: Path, *, only: str | None, device: str, repeats: int, show: bool, command: str
) -> None:
    """Measure the cells that a command's options choose, or show their names."""
    try:
        check_device(device)
        chosen = choose(cells, only)
    except WhenceError as failure:
        raise SystemExit(f"{command}: {failure}") from None
    if show:
        print("\n".join(cell.name for cell in chosen))
        return
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    measure(out, chosen, device, repeats)


Only = Annotated[
    str | None, typer.Option(help="Names of cells, or their first parts, or patterns with *, separated by commas.")
]
Device = Annotated[str, typer.Option(help="Where it is computed: cpu or cuda.")]
Repeats = Annotated[int, typer.Option(help="The most turns of a measurement; long ones may have fewer.", min=1)]
Show = Annotated[bool, typer.Option("--list", help="Show the cells' names, and measure nothing.")]


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/benchmarks"),
    only: Only = None,
    device: Device = "cpu",
    repeats: Repeats = 5,
    show: Show = False,
) -> None:
    """Measure, and write cells.parquet."""
    command = "studies.benchmarks.run"
    measure_chosen(list_cells(), out, only=only, device=device, repeats=repeats, show=show, command=command)


if __name__ == "__main__":
    typer.run(main)
