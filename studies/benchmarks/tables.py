"""Tables of the suite's cells: `python -m studies.benchmarks.tables results/benchmarks` writes tables.md.

Medians, with the lowest and the highest in brackets. "~" marks what was estimated from fewer records.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from studies.benchmarks.cells import Result, read_results
from studies.benchmarks.engines import ENGINES, LANGUAGE_ENGINES, ROWS, SIZES
from studies.benchmarks.engines import POLICIES as ENGINE_POLICIES
from studies.benchmarks.peers import POLICIES
from studies.benchmarks.policies import LANGUAGE, WIDTHS
from studies.benchmarks.timing import fit_exponent
from studies.shared import Out, cell, table, write_page

PEERS = (
    *("torch-vmap", "matrix-vmap", "matrix-loop", "opacus", "dattri", "captum", "captum-fast", "kronfluence"),
    *("kronfluence-ekfac", "trak", "dattri-llm", "dattri-llm-hooks", "bergson"),
)
"""The peers in the order of the tables. The code of those that no command has any more is in the history."""

FLAT = 0.05
"""The change of the peak, at most, for which memory counts as flat."""

SAME = 1e-4
"""The difference of scores from whence's, over the largest score, below which they are the same."""

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


def tabulate(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a table; nothing if there is no row."""
    lines = [*rows]
    return table([head, *lines]) if lines else ""


def tabulate_by_records(cells: Cells, policies: Sequence[str], engines: Sequence[str], sizes: Sequence[int]) -> str:
    """Return seconds, and ratios to a plain pass, by policy and engine; the columns are numbers of records."""

    def show_cell(name: str) -> str:
        line = cells.get(name)
        if line is None or "refused" in line:
            return "–" if line is None else "no"
        mark = mark_of(line)
        return f"{mark}{show_seconds(line['seconds']['median'])}, {mark}{line['ratio']['median']:.2f}×"

    names = [f"{policy}/{engine}" for policy in policies for engine in engines]
    rows = [[f"`{name}`", *(show_cell(f"{name}/{size}") for size in sizes)] for name in names]
    return tabulate(["policy/engine", *(f"{size:,}" for size in sizes)], [row for row in rows if {*row[1:]} != {"–"}])


def tabulate_engines(cells: Cells) -> str:
    """Return a line for each cell of scoring."""
    order = [*ENGINE_POLICIES, *(f"width-{width}" for width in WIDTHS), *LANGUAGE]
    known = [(*name.split("/"), line) for name, line in cells.items() if line["section"] == "engines"]
    known.sort(key=lambda each: (order.index(each[0]), ENGINES.index(each[1]), each[3]["records"]))
    rows = []
    for *_, line in known:
        first = [show_command(line["cell"]), f"{line['records']:,}"]
        if "refused" in line:
            rows.append([*first, show_failure(line), "–", "–", "–"])
            continue
        mark = mark_of(line)
        seconds, plain = (show(line[key], show_seconds, mark) for key in ("seconds", "plain"))
        turns = f"0 ({line['estimated']})" if mark else str(line["seconds"]["turns"])
        rows.append([*first, seconds, show(line["ratio"], mark=mark), plain, turns])
    return tabulate(["cell", "records", "scoring", "of plain passes", "plain pass", "turns"], rows)


def find_peaks(cells: Cells) -> dict[str, list[Result]]:
    """Return the measured cells with a peak of each policy and engine, by the number of records."""
    peaks: dict[str, list[Result]] = {}
    for name, line in cells.items():
        if line["section"] == "engines" and "peak" in line and not name.startswith("width-"):
            peaks.setdefault(name.rsplit("/", 1)[0], []).append(line)
    return {row: sorted(each, key=lambda line: line["records"]) for row, each in peaks.items()}


def show_change(size: int, change: float) -> str:
    """Return whether a peak is flat from so many records on, and its change."""
    text = f"{change:+.0%}" if change < 1 else f"{change + 1:,.0f} times"
    return f"from {size:,}: {'yes' if abs(change) <= FLAT else 'no'}, {text}".replace("-", "−")


def tabulate_memory(cells: Cells) -> str:
    """Return the peaks of each policy and engine under its budget, and how they change up to the most records."""
    rows = []
    for row, lines in find_peaks(cells).items():
        budget, peaks = lines[0]["budget"], {line["records"]: line["peak"]["tensors"] for line in lines}
        *sizes, last = peaks
        changes = [show_change(n, peaks[last] / peaks[n] - 1) for n in sizes if n in (2048, sizes[-1])]
        grown = [line["peak"]["grown"] for line in lines]
        within = max(*peaks.values(), *(each or 0 for each in grown)) <= budget
        shown = ", ".join(f"{n:,}: {show_bytes(peak)}" for n, peak in peaks.items())
        texts = [show_bytes(budget), shown, show_bytes(grown[-1]), "yes" if within else "**no**"]
        rows.append([f"`{row}`", *texts, "; ".join(changes) or "–"])
    head = ["policy/engine", "budget, MiB", "tensors, MiB, by records", "process, MiB", "in it", "flat within 5%"]
    return tabulate(head, rows)


def tabulate_growth(cells: Cells) -> str:
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
    rows = []
    for name, points in sorted(series.items()):
        sizes, seconds = zip(*sorted(points), strict=True)
        if len(set(sizes)) > 1:
            ends = f"{sizes[0]:,}", f"{sizes[-1]:,}"
            rows.append([name, f"{fit_exponent(sizes, seconds):.2f}", *ends, str(len(sizes))])
    return tabulate(["policy/engine, grows with", "exponent", "from", "to", "sizes"], rows)


def list_section(cells: Cells, section: str) -> Iterable[Result]:
    """Return the cells of a section."""
    return (line for line in cells.values() if line["section"] == section)


def tabulate_training(cells: Cells) -> str:
    """Return scoring compared with SB3's training."""
    rows = [
        [
            *(show_command(line["cell"]), f"{line['records']:,}", show(line["seconds"], show_seconds)),
            *(show(line["share"], "{:.2%}".format), f"{line['memory']:.2f}"),
            show(line["ten_targets"], "{:.1f}".format),
        ]
        for line in list_section(cells, "training")
    ]
    return tabulate(
        ["cell", "records", "scoring", "of SB3's `train()`", "memory / training step", "ten targets / one"], rows
    )


def tabulate_peers(cells: Cells) -> str:
    """Return other libraries compared with whence."""
    rows = []
    for line in (cells.get(f"peers/{policy}/{peer}") for policy in POLICIES for peer in PEERS):
        if line is None:
            continue
        first = [show_command(line["cell"]), f"{line['records']:,}"]
        if "refused" in line:
            rows.append([*first, show_failure(line), "–", "–", "–", "–"])
            continue
        first.append(show(line["seconds"], show_seconds, mark_of(line)))
        if "estimated" in line:
            rows.append([*first, f"– ({line['estimated']})", "–", line["note"] or "–", "–"])
            continue
        grown, of_whence = (show_bytes((line[key] or {}).get("grown")) for key in ("peak", "whence_peak"))
        texts = [show(line["ratio"], "{:.3g}".format), f"{grown} ({of_whence})", show_difference(line)]
        rows.append([*first, *texts, cell(line["spearman"])])
    return tabulate(
        ["cell", "records", "seconds", "of whence's", "process, MiB (whence's)", "scores differ by", "Spearman"], rows
    )


def show_difference(line: Result) -> str:
    """Return how far a peer's scores are from whence's, and why, if they are others by definition."""
    difference, of_layers = line["difference"], line.get("difference_of_layers")
    text = f"{difference:.0e}"
    if of_layers is not None:
        text = f"other: {line['note']}; from whence's of that layer by {of_layers:.0e}"
    elif line["note"] and difference >= SAME:
        text = f"{text}, other: {line['note']}" if difference < 0.1 else f"other: {line['note']}"
    return text.replace("e-", "e−")


def tabulate_steps(cells: Cells) -> str:
    """Return training passes with scores made in them, compared with plain ones."""
    rows = []
    for line in filter(None, (cells.get(f"steps/{policy}") for policy in POLICIES)):
        passes = [
            f"{show(line[name], show_seconds)}; {show(line['ratios'][name])}×, "
            f"{show_bytes((line['peaks'][name] or {}).get('grown'))} MiB"
            for name in ("seconds", "dattri")
        ]
        plain = f"{show(line['plain'], show_seconds)}; {show_bytes((line['peaks']['plain'] or {}).get('grown'))} MiB"
        rows.append([show_command(line["cell"]), str(line["records"]), plain, *passes, show_difference(line)])
    return tabulate(["cell", "rows", "plain pass", "whence", "dattri-LLM", "scores differ by"], rows)


def tabulate_operations(cells: Cells) -> str:
    """Return the floating-point operations of scoring, over those of a plain pass."""
    lines = [*filter(None, (cells.get(f"operations/{policy}") for policy in POLICIES))]
    names = list(lines[0]["passes"]) if lines else []
    rows = [
        [show_command(line["cell"]), str(line["records"]), *(f"{line['passes'][name]:.2f}" for name in names)]
        for line in lines
    ]
    return tabulate(["cell", "rows", *names], rows)


def tabulate_rounds(cells: Cells) -> str:
    """Return whole rounds by stage."""
    names, rows = ("collection", "scoring", "optimisation", "round"), []
    for line in list_section(cells, "rounds"):
        for place, (kind, stages) in enumerate(line["stages"].items()):
            texts = [show(stages[key], show_seconds) if key in stages else "–" for key in names]
            if not place:
                texts[1] = "–"
            elif "share" in line:
                texts[1] += f"; {line['share']['median']:.1%} of the round"
            rows.append([show_command(line["cell"]), kind, *texts, show(line["ratio"]) if place else "1"])
    return tabulate(["cell", "training", *names, "of the plain round"], rows)


def tabulate_errors(cells: Cells) -> str:
    """Return what errors of scores cost."""
    rows = []
    for line in list_section(cells, "errors"):
        seconds = (show(line[key], show_seconds) for key in ("without", "seconds"))
        rows.append([show_command(line["cell"]), f"{line['records']:,}", *seconds, show(line["ratio"])])
    return tabulate(["cell", "records", "scores", "scores with errors", "of scores alone"], rows)


def tabulate_install(cells: Cells) -> str:
    """Return the seconds from nothing to the first result."""
    if (line := cells.get("install/example")) is None:
        return ""
    stages = {**line["stages"], "together": line["seconds"]["median"]}
    return table([["cell", *stages], [show_command(line["cell"]), *map(show_seconds, stages.values())]])


def make_sections(cells: Cells) -> dict[str, str]:
    """Return the tables by their headings; some may be empty."""
    widths = [f"width-{width}" for width in WIDTHS]
    return {
        "Scoring by the number of records: seconds, and plain passes": tabulate_by_records(
            cells, ENGINE_POLICIES, ENGINES, SIZES
        ),
        "Language models by the number of rows": tabulate_by_records(cells, LANGUAGE, LANGUAGE_ENGINES, ROWS),
        "MLPs of growing width": tabulate_by_records(cells, widths, ENGINES, SIZES[1:2]),
        "How the time grows": tabulate_growth(cells),
        "Memory under a budget": tabulate_memory(cells),
        "Compared with training": tabulate_training(cells),
        "Other libraries": tabulate_peers(cells),
        "Floating-point operations of scoring, in plain passes": tabulate_operations(cells),
        "Scores made in a training pass": tabulate_steps(cells),
        "Errors of scores": tabulate_errors(cells),
        "Whole rounds": tabulate_rounds(cells),
        "From `pip install` to the first result": tabulate_install(cells),
        "Each cell of scoring": tabulate_engines(cells),
    }


def write_tables(out: Out = Path("results/benchmarks")) -> None:
    """Write tables.md from cells.parquet."""
    parts = [
        "# Tables",
        "A cell is measured alone by `python -m studies.benchmarks.run results/benchmarks` and what stands in its\n"
        "first column, or for a table by the number of records by `--only POLICY/ENGINE/RECORDS`. `~` was estimated.",
    ]
    for device, cells in read_results(out).items():
        about = sorted({f"{line['machine']}, torch {line['torch']}" for line in cells.values()})
        parts.append(f"## {device} ({'; '.join(about)})")
        parts += [f"### {heading}\n\n{text}" for heading, text in make_sections(cells).items() if text]
    write_page(out / "tables.md", *parts)


if __name__ == "__main__":
    typer.run(write_tables)
