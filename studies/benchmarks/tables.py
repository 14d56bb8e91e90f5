"""Tables of the suite's cells: `python -m studies.benchmarks.tables results/benchmarks` writes tables.md, summary.json.

Medians, with the lowest and the highest in brackets. "~" marks what was estimated from fewer records.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.benchmarks.cells import Result, read_results
from studies.benchmarks.engines import ENGINES, LANGUAGE_ENGINES, ROWS, SIZES
from studies.benchmarks.engines import POLICIES as ENGINE_POLICIES
from studies.benchmarks.engines import list_cells as list_engine_cells
from studies.benchmarks.libraries import PEERS
from studies.benchmarks.peers import POLICIES
from studies.benchmarks.policies import LANGUAGE, WIDTHS
from studies.benchmarks.timing import fit_exponent
from studies.markdown import table
from whence.core import write_atomically

FLAT = 0.05
"""The change of the peak, at most, for which memory counts as flat."""

Cells = Mapping[str, Result]


def show_seconds(seconds: float) -> str:
    """Return seconds with three digits, in a unit that suits them."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def show(entry: Mapping[str, float], form: Any = "{:.2f}".format, mark: str = "") -> str:
    """Return a median with its lowest and highest, if there are several values."""
    text = f"{mark}{form(entry['median'])}"
    return text if entry.get("turns", 1) == 1 else f"{text} [{form(entry['low'])}, {form(entry['high'])}]"


def show_bytes(count: float | None) -> str:
    """Return bytes in MiB."""
    return "–" if count is None else f"{count / 2**20:,.1f}"


def show_command(cell: str) -> str:
    """Return what measures a cell alone, after `python -m studies.benchmarks.run`."""
    return f"`--only {cell}`"


def show_failure(line: Result) -> str:
    """Return why a cell has no figure, short enough for a table."""
    text = line["refused"].replace("|", "/")
    return f"no: {text[:157]}…" if len(text) > 158 else f"no: {text}"


def mark_of(line: Result) -> str:
    """Return "~" for an estimate."""
    return "~" if "estimated" in line else ""


def tabulate_by_records(cells: Cells, policies: Sequence[str], engines: Sequence[str], sizes: Sequence[int]) -> str:
    """Return seconds, and ratios to a plain pass, by policy and engine; the columns are numbers of records."""
    lines = [["policy/engine", *(f"{size:,}" for size in sizes)]]
    for row in (f"{policy}/{engine}" for policy in policies for engine in engines):
        texts = []
        for size in sizes:
            line = cells.get(f"{row}/{size}")
            if line is None or "refused" in line:
                texts.append("–" if line is None else "no")
                continue
            mark = mark_of(line)
            texts.append(f"{mark}{show_seconds(line['seconds']['median'])}, {mark}{line['ratio']['median']:.2f}×")
        if any(text != "–" for text in texts):
            lines.append([f"`{row}`", *texts])
    return table(lines) if len(lines) > 1 else ""


def tabulate_engines(cells: Cells) -> str:
    """Return a line for each cell of scoring."""
    lines = [["cell", "records", "scoring", "of plain passes", "plain pass", "turns"]]
    for name in (cell.name for cell in list_engine_cells() if cell.section == "engines"):
        if (line := cells.get(name)) is None:
            continue
        if "refused" in line:
            lines.append([show_command(name), f"{line['records']:,}", show_failure(line), "–", "–", "–"])
            continue
        mark = mark_of(line)
        values = [show(line[key], show_seconds, mark) for key in ("seconds", "plain")]
        turns = f"0 ({line['estimated']})" if mark else str(line["seconds"]["turns"])
        ratio = show(line["ratio"], mark=mark)
        lines.append([show_command(name), f"{line['records']:,}", values[0], ratio, values[1], turns])
    return table(lines) if len(lines) > 1 else ""


def find_peaks(cells: Cells) -> dict[str, list[Result]]:
    """Return the measured cells with a peak of each policy and engine, by the number of records."""
    peaks: dict[str, list[Result]] = {}
    for name, line in cells.items():
        if line["section"] == "engines" and "peak" in line and not name.startswith("width-"):
            peaks.setdefault(name.rsplit("/", 1)[0], []).append(line)
    return {row: sorted(each, key=lambda line: line["records"]) for row, each in peaks.items()}


def compare_peaks(lines: Sequence[Result]) -> dict[str, Any]:
    """Return the peaks by records, their change up to the most records, and whether they are within the budget."""
    peaks = {line["records"]: line["peak"]["tensors"] for line in lines}
    last, grown = max(peaks), [line["peak"]["grown"] or 0 for line in lines]
    return {
        "budget": lines[0]["budget"],
        "tensors": peaks,
        "grown": lines[-1]["peak"]["grown"],
        "changes": {
            size: peaks[last] / peaks[size] - 1 for size in list(peaks)[:-1] if size in (2048, list(peaks)[-2])
        },
        "within": max(*peaks.values(), *grown) <= lines[0]["budget"],
    }


def show_change(change: float) -> str:
    """Return whether a peak is flat, and its change."""
    size = f"{change:+.0%}" if change < 1 else f"{change + 1:,.0f} times"
    return f"{'yes' if abs(change) <= FLAT else 'no'}, {size}".replace("-", "−")


def tabulate_memory(cells: Cells) -> str:
    """Return the peaks of each policy and engine under its budget."""
    head = ["policy/engine", "budget, MiB", "tensors, MiB, by records", "process, MiB", "in it", "flat within 5%"]
    lines = [head]
    for row, each in find_peaks(cells).items():
        memory = compare_peaks(each)
        peaks = ", ".join(f"{n:,}: {show_bytes(peak)}" for n, peak in memory["tensors"].items())
        flat = "; ".join(f"from {size:,}: {show_change(change)}" for size, change in memory["changes"].items()) or "–"
        grown, within = show_bytes(memory["grown"]), "yes" if memory["within"] else "**no**"
        lines.append([f"`{row}`", show_bytes(memory["budget"]), peaks, grown, within, flat])
    return table(lines) if len(lines) > 1 else ""


def fit_growth(cells: Cells) -> dict[str, dict[str, Any]]:
    """Return the exponents of seconds in records, and in parameters, with the sizes that they were fitted to."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name, line in cells.items():
        if line["section"] != "engines" or "estimated" in line or "refused" in line:
            continue
        policy, engine, _ = name.split("/")
        point = line["seconds"]["median"]
        if policy in LANGUAGE or (not policy.startswith("width-") and line["records"] >= 2048):
            series.setdefault(f"{policy}/{engine}, records", []).append((line["records"], point))
        if policy.startswith("width-") or (policy in LANGUAGE and line["records"] == ROWS[0]):
            kind = "MLPs" if policy.startswith("width-") else "LoRA" if policy.endswith("-lora") else "transformers"
            series.setdefault(f"{kind}/{engine}, parameters", []).append((line["parameters"], point))
    growth = {}
    for name, points in series.items():
        sizes, seconds = zip(*sorted(points), strict=True)
        if len(set(sizes)) > 1:
            growth[name] = {"exponent": fit_exponent(sizes, seconds), "sizes": list(sizes)}
    return growth


def tabulate_growth(cells: Cells) -> str:
    """Return the exponents."""
    lines = [["policy/engine, grows with", "exponent", "from", "to", "sizes"]]
    for name, each in sorted(fit_growth(cells).items()):
        first, last = each["sizes"][0], each["sizes"][-1]
        lines.append([name, f"{each['exponent']:.2f}", f"{first:,}", f"{last:,}", str(len(each["sizes"]))])
    return table(lines) if len(lines) > 1 else ""


def tabulate_training(cells: Cells) -> str:
    """Return scoring beside SB3's training."""
    lines = [["cell", "records", "scoring", "of SB3's `train()`", "memory / training step", "ten targets / one"]]
    for name, line in cells.items():
        if line["section"] == "training":
            share = show(line["share"], "{:.2%}".format)
            values = [f"{line['records']:,}", show(line["seconds"], show_seconds), share, f"{line['memory']:.2f}"]
            lines.append([show_command(name), *values, show(line["ten_targets"], "{:.1f}".format)])
    return table(lines) if len(lines) > 1 else ""


def tabulate_peers(cells: Cells) -> str:
    """Return other libraries beside whence."""
    lines = [["cell", "records", "seconds", "of whence's", "process, MiB (whence's)", "scores differ by", "Spearman"]]
    for policy in POLICIES:
        for peer in PEERS:
            name = f"peers/{policy}/{peer}"
            if (line := cells.get(name)) is None:
                continue
            first = [show_command(name), f"{line['records']:,}"]
            if "refused" in line:
                lines.append([*first, show_failure(line), "–", "–", "–", "–"])
                continue
            seconds = show(line["seconds"], show_seconds, mark_of(line))
            if "estimated" in line:
                lines.append([*first, seconds, f"– ({line['estimated']})", "–", line["note"] or "–", "–"])
                continue
            grown = [show_bytes((line[key] or {}).get("grown")) for key in ("peak", "whence_peak")]
            lines.append(
                [
                    *(*first, seconds, show(line["ratio"], "{:.3g}".format), f"{grown[0]} ({grown[1]})"),
                    *(show_difference(line), f"{line['spearman']:.3f}".replace("-", "−")),
                ]
            )
    return table(lines) if len(lines) > 1 else ""


def show_difference(line: Result) -> str:
    """Return how far a peer's scores are from whence's, and why, if they are others by definition."""
    of_layers = line.get("difference_of_layers")
    if of_layers is not None:
        return f"other: {line['note']}; from whence's of that layer by {of_layers:.0e}".replace("e-", "e−")
    is_same = line["difference"] < 1e-3
    return f"{line['difference']:.0e}".replace("e-", "e−") if is_same or not line["note"] else f"other: {line['note']}"


def tabulate_rounds(cells: Cells) -> str:
    """Return whole rounds by stage."""
    lines = [["cell", "training", "collection", "scoring", "optimisation", "round", "of the plain round"]]
    for name, line in cells.items():
        if line["section"] != "rounds":
            continue
        for place, (kind, stages) in enumerate(line["stages"].items()):
            names = ("collection", "scoring", "optimisation", "round")
            texts = [show(stages[key], show_seconds) if key in stages else "–" for key in names]
            if not place:
                texts[1] = "–"
            elif "share" in line:
                texts[1] += f"; {line['share']['median']:.1%} of the round"
            lines.append([show_command(name), kind, *texts, show(line["ratio"]) if place else "1"])
    return table(lines) if len(lines) > 1 else ""


def tabulate_errors(cells: Cells) -> str:
    """Return what errors of scores cost."""
    lines = [["cell", "records", "scores", "scores with errors", "of scores alone"]]
    for name, line in cells.items():
        if line["section"] == "errors":
            seconds = (show(line[key], show_seconds) for key in ("without", "seconds"))
            lines.append([show_command(name), f"{line['records']:,}", *seconds, show(line["ratio"])])
    return table(lines) if len(lines) > 1 else ""


def tabulate_install(cells: Cells) -> str:
    """Return the seconds from nothing to the first result."""
    line = cells.get("install/example")
    if line is None:
        return ""
    stages = {**line["stages"], "together": line["seconds"]["median"]}
    name = show_command("install/example")
    return table([["cell", *stages], [name, *(show_seconds(seconds) for seconds in stages.values())]])


def make_sections(cells: Cells) -> dict[str, str]:
    """Return the tables by their headings; an empty one is left out."""
    widths = [f"width-{width}" for width in WIDTHS]
    sections = {
        "Scoring by the number of records: seconds, and plain passes": tabulate_by_records(
            cells, ENGINE_POLICIES, ENGINES, SIZES
        ),
        "Language models by the number of rows": tabulate_by_records(cells, LANGUAGE, LANGUAGE_ENGINES, ROWS),
        "MLPs of growing width": tabulate_by_records(cells, widths, ENGINES, SIZES[1:2]),
        "How the time grows": tabulate_growth(cells),
        "Memory under a budget": tabulate_memory(cells),
        "Compared with training": tabulate_training(cells),
        "Other libraries": tabulate_peers(cells),
        "Errors of scores": tabulate_errors(cells),
        "Whole rounds": tabulate_rounds(cells),
        "From `pip install` to the first result": tabulate_install(cells),
        "Each cell of scoring": tabulate_engines(cells),
    }
    return {heading: text for heading, text in sections.items() if text}


def make_page(results: Mapping[str, Cells]) -> str:
    """Return all tables as a page."""
    parts = [
        "# Tables",
        "A cell is measured alone by `python -m studies.benchmarks.run results/benchmarks` and what stands in its\n"
        "first column, or for a table by the number of records by `--only POLICY/ENGINE/RECORDS`. `~` was estimated.",
    ]
    for device, cells in results.items():
        about = sorted({f"{line['machine']}, torch {line['torch']}" for line in cells.values()})
        parts.append(f"## {device} ({'; '.join(about)})")
        parts += [f"### {heading}\n\n{text}" for heading, text in make_sections(cells).items()]
    return "\n\n".join(parts) + "\n"


def summarise(results: Mapping[str, Cells]) -> dict[str, Any]:
    """Return the figures that texts quote, by device."""
    return {
        device: {
            "growth": fit_growth(cells),
            "memory": {row: compare_peaks(lines) for row, lines in find_peaks(cells).items()},
            "cells": {
                name: {key: value for key, value in line.items() if key != "cell"} for name, line in cells.items()
            },
        }
        for device, cells in results.items()
    }


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/benchmarks"),
) -> None:
    """Write tables.md and summary.json from cells.parquet."""
    results = read_results(out)
    if not results:
        raise SystemExit(
            f"studies.benchmarks.tables: {out} has no cells. Run first: python -m studies.benchmarks.run {out}"
        )
    summary = json.dumps(summarise(results), indent=1, allow_nan=False)
    for name, text in (("tables.md", make_page(results)), ("summary.json", summary + "\n")):
        with write_atomically(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
