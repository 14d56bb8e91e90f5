"""The table of `results/reliability/README.md`, from its kills: `python -m studies.reliability.tables`."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.markdown import table
from studies.reliability.worlds import STAGES


def describe_kills(path: Path) -> str:
    """Return two tables: the kills of each training and signal, with trainings that ended otherwise; and of stages."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["world"], line["signal"]].append(line)
    rows = [
        [world, signal, len(trials), sum(len(t["stages"]) for t in trials), sum(bool(t["differences"]) for t in trials)]
        for (world, signal), trials in groups.items()
    ]
    sums = ["all", "", *(sum(row[place] for row in rows) for place in (2, 3, 4))]
    trainings = table([_HEAD, *(list(map(str, row)) for row in [*rows, sums])])
    counts = Counter(stage for line in lines if not line["world"].startswith("language") for stage in line["stages"])
    stages = table(
        [["killed in (agents)", "times"], *([stage, str(counts[stage])] for stage in STAGES if counts[stage])]
    )
    return f"{trainings}\n\n{stages}"


_HEAD = ["training", "signal", "trainings", "kills", "ended otherwise"]


def main(path: Annotated[Path, typer.Argument(help="kills.jsonl.")] = Path("results/reliability/kills.jsonl")) -> None:
    """Print the table."""
    typer.echo(describe_kills(path))


if __name__ == "__main__":
    typer.run(main)
