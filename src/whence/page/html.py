"""The page of runs as one HTML file that needs no network; and the same page for a server."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_args

import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs
from markupsafe import Markup

from whence.core import show, write_atomically
from whence.page.content import (
    EMBEDDED,
    MOMENTS,
    TARGETS,
    ExploredRun,
    attempt,
    build_pivot,
    build_round,
    choose_pairs,
    choose_steps,
    compress_text,
    describe_record,
    describe_runs,
    identify_run,
    list_groups,
    list_moments,
    make_thumb,
    name_target,
    read_answers,
    read_metrics,
    replay_moments,
    round_numbers,
    spread,
    write_json,
)
from whence.page.figures import Colours, Tables, arm_colours, draw_figures, has
from whence.page.templates import SCRIPTS, STYLES, load_template, read_asset
from whence.runs import RunDirectory, Table, explain_distrust
from whence.scores import find_moment

EMBEDDED_ROUNDS = 24
"""Rounds of a run that its file holds, besides those of findings, unless others are named: each takes a tenth of a
second, and 20 kB."""

LISTED = 6
"""Moments at either end of a round that a file holds; a server lists more, and opens every record."""

FRAMED = 1
"""Moments at either end of a round that have frames."""

TOKENS = 8
"""Responses at either end of a round that have numbers of each token."""

LINKED_RESPONSES = 32
"""Responses of a finding that can be opened, and have these numbers, too."""

COMPARED_ROUNDS = 12
"""Rounds of each run that a comparison's file holds at most."""

DIGITS = 4
"""Significant digits of a number in the file."""

NOT_EMBEDDED = "This file has frames of the surest harmful and the surest helpful moment of a round."

OnRound = Callable[[int, int], None]
"""Called with the number of rounds that are done, and of all."""

Runs: TypeAlias = Mapping[tuple[str, int | None], RunDirectory]
"""Runs by their names and seeds; None: the seed is not known."""


def write_report(
    shown: RunDirectory | ExploredRun | Sequence[ExploredRun],
    path: Path,
    *,
    rounds: Sequence[int] | None = None,
    on_round: OnRound | None = None,
) -> None:
    """Write the page of a run, or of several to be compared, atomically; a run need not have any round.

    Embedded are `rounds`; None: 24, of several runs 12 of each, evenly spread, and those of findings.
    """
    shown = ExploredRun(shown) if isinstance(shown, RunDirectory) else shown
    runs = [shown] if isinstance(shown, ExploredRun) else shown
    most = EMBEDDED_ROUNDS if len(runs) == 1 else COMPARED_ROUNDS
    write_page(path, render_runs(runs, [choose_rounds(run, rounds, most) for run in runs], on_round))


def write_page(path: Path, html: str) -> None:
    """Write a page, atomically."""
    with write_atomically(path) as temporary:
        # Half of a pair of surrogates, which JSON may hold, is no character.
        temporary.write_text(html, encoding="utf-8", errors="replace")


def render_runs(
    runs: Sequence[ExploredRun], rounds: Sequence[Sequence[int]] | None = None, on_round: OnRound | None = None
) -> str:
    """Return the page of some runs, and of the rounds of each to embed; None: a server is asked for them."""
    notes: list[str] = []
    directories = _name_runs(runs)
    first, is_alone = runs[0].directory, len(runs) == 1
    held, stored = sum(map(len, rounds or ())), [number for run in runs for number in run.directory.rounds()]
    if rounds is not None and held < len(stored):
        names = shlex.join(str(run.directory.path) for run in runs[1:])
        others = f"{names} --rounds {stored[0]}-{first.rounds()[:EMBEDDED_ROUNDS][-1]}{' --out FILE' * (not is_alone)}"
        notes.append(
            f"This file holds {held} of the {len(stored):,} rounds. `{runs[0].name_command('view', names)}` shows all "
            f"of them; `{runs[0].name_command('report', others.strip())}` writes others."
        )
    _, seed = identify_run(first)
    done, planned = len(first.table("metrics")), runs[0].planned
    counted = f"{done} of {count(planned, 'round')}" if planned is not None else count(done, "round")
    subtitle = f"{counted}. " if seed is None else f"Seed {seed}, {counted}. "
    labels = [name for name, _ in directories]
    return render(
        directories,
        runs,
        _choose_colours(directories),
        notes,
        title=f"{first.config.get('env') or first.path.resolve().name}: {', '.join(labels)}",
        subtitle=(subtitle + runs[0].about).strip() if is_alone else f"{count(len(runs), 'run')}.",
        unstarted=not any(run.directory.rounds() for run in runs),
        latest=list_latest(first) if is_alone else [],
        rounds=rounds,
        on_round=on_round,
        facts=list_facts(first.config, directories.values()),
    )


def list_figures(runs: Sequence[ExploredRun]) -> list[dict[str, Any]]:
    """Return the served page's figures with titles and explanations, as Plotly's JSON."""
    directories = _name_runs(runs)
    drawings = draw_figures(read_tables(directories), _choose_colours(directories))
    return [{"title": title, "about": about, "figure": _plot_as_json(figure)} for title, about, figure in drawings]


def choose_rounds(run: ExploredRun, wanted: Sequence[int] | None, most: int) -> list[int]:
    """Return the rounds of a run to embed: those wanted, which have to be there, or `most`, and those of findings."""
    if wanted:
        run.directory.require_rounds(wanted)
    rounds = run.directory.rounds()
    if wanted is None and len(rounds) > most:
        named = {finding["round"] for finding in run.list_findings()} - {None}
        wanted = [*spread(rounds, most), *named.intersection(rounds)]
    return rounds if wanted is None else sorted(set(wanted))


def _name_runs(runs: Sequence[ExploredRun]) -> Runs:
    if len(runs) == 1:
        return {identify_run(runs[0].directory): runs[0].directory}
    return {(run.label, None): run.directory for run in runs}


def _choose_colours(runs: Runs) -> Colours:
    """Return a colour for each run; a run alone that is a plain arm has the colour that it has in comparisons."""
    ((label, _), run), *others = runs.items()
    is_plain = not others and bool(run.experiment) and run.config.get("rule") == {"rule": "KeepAll"}
    return arm_colours((name for name, _ in runs), label if is_plain else None)


def embed(value: Any) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin another."""
    return Markup(write_json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def render(
    runs: Runs,
    explored: Sequence[ExploredRun],
    colours: Colours,
    notes: list[str],
    *,
    rounds: Sequence[Sequence[int]] | None,
    on_round: OnRound | None = None,
    **content: Any,
) -> str:
    """Return the page of some runs, of which some can be explored."""
    notes += _list_resumptions(runs)
    if not all(run.is_trusted for run in runs.values()):
        notes.append("Not made by you in this place: what was measured is shown as the files say, and not checked.")
    strangers = [run for run in explored if not (run.is_language or run.env or run.directory.is_trusted)]
    page = describe_runs(explored, rounds)
    embedded = () if rounds is None else embed_rounds(explored, rounds, on_round)
    seeds = len({seed for _, seed in runs})
    # A served page asks for its figures once its first round is shown.
    draw = partial(draw_figures, colours=colours, seeds=seeds)
    figures = [] if rounds is None else attempt(lambda: draw(read_tables(runs)), notes, "Figures cannot be drawn", [])
    targets = {name_target(run.directory.config.get("target")) for run in explored}
    answers = read_answers([run for run in explored if run.is_language], notes)
    content |= {
        "answers_json": None if answers is None else embed(answers),
        "language": page["kind"] == "responses",
        "notes": notes,
        "distrust": [explain_distrust(run.directory.path) for run in strangers[:1]],
        "mode": page["mode"],
        "figures": [(title, about) for title, about, _ in figures],
        "figures_json": embed([_plot_as_json(figure) for _, _, figure in figures]),
        "explored": rounds is None or any(rounds),
        "target": targets.pop() if len(targets) == 1 and targets <= {*TARGETS.values()} else "",
        "rollouts": next(filter(None, (run.directory.config.get("rollouts") for run in explored)), ""),
        "page_json": embed(page),
        "round_scripts": list(embedded),
    }
    return load_template().render(
        content,
        style=Markup("\n".join(read_asset(name) for name in ("page.css", *STYLES))),
        figures_js=Markup(read_asset("figures.js")),
        scripts=[Markup(read_asset(name)) for name in SCRIPTS],
    )


def embed_rounds(
    runs: Sequence[ExploredRun], rounds: Sequence[Sequence[int]], on_round: OnRound | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the id of each round of some runs, and its text: JSON, compressed by gzip, as base64."""
    places = [(index, number) for index, numbers in enumerate(rounds) for number in numbers]
    findings = [run.list_findings() for run in runs]  # once: a run that is being trained has others later
    for done, (index, number) in enumerate(places, start=1):
        about = [finding for finding in findings[index] if finding["round"] == number]
        content = round_numbers(_build_content(runs[index], number, about), DIGITS)
        yield f"round-{index}-{number}", compress_text(write_json(content))
        if on_round is not None:
            on_round(done, len(places))


def _build_content(run: ExploredRun, number: int, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a round with the details of its moments; `findings` are those about it."""
    linked = [record for finding in findings for record in finding["records"]]
    most = MOMENTS if run.is_language else LISTED
    shown = build_round(run, number, rows=True, records=linked, most=most)
    records = run.round(number)
    worst, best = list_moments(records, [], most)
    present = {*records.table["record_id"]}
    most = LINKED_RESPONSES if run.is_language else FRAMED
    named = [find_moment(records.table, record) for record in linked[:most] if record in present]
    framed = [] if run.is_language else [*worst[:FRAMED], *best[:FRAMED], *named]
    # Every second step: what moves is seen in half of the bytes.
    replays = replay_moments(run, [(moment, choose_steps(moment.step, every=2)) for moment in framed])
    details, thumbs = {}, {}
    for moment in (*worst, *best, *named):
        frames, note = replays.get(moment.record_id, ({}, NOT_EMBEDDED))
        # Numbers of each token would make the file heavy.
        is_first = moment in (*worst[:TOKENS], *best[:TOKENS], *named)
        detail = describe_record(run, number, moment, replay=(frames, note), with_tokens=is_first)
        details[str(moment.record_id)] = detail
        if moment.step is not None and moment.step in frames:
            thumbs[moment.record_id] = make_thumb(frames[moment.step])
    for about in (*shown["worst"], *shown["best"]):
        about["thumb"] = about["thumb"] or thumbs.get(about["record"])
    # Differences of ids are short, and the strip's colours and words have three digits.
    strip = shown["strip"]
    strip["record_ids"] = [after - before for before, after in pairwise([0, *strip["record_ids"]])]
    strip["scores"] = round_numbers(strip["scores"], 3)
    shown["groupings"] = shown["groupings"][:EMBEDDED]
    keys = [entry["key"] for entry in shown["groupings"]]
    shown["pairs"] = choose_pairs(keys, findings)
    groupings = [*([key] for key in keys), *shown["pairs"]]
    pivots = {"\n".join(by): build_pivot(run, number, by) for by in groupings}
    content: dict[str, Any] = {"round": shown, "details": details, "pivots": pivots}
    if run.is_language:
        # Once for all of a prompt's responses, since each of them shows the others.
        content["groups"] = list_groups(records, [int(record) for record in details])
    return content


def _plot_as_json(figure: go.Figure) -> Any:
    # Plotly's own encoder turns NaN into null. The page sets the colours that a template would set.
    parts = json.loads(figure.to_json())
    parts["layout"].pop("template", None)
    return parts


def read_tables(runs: Runs) -> Tables:
    """Return each table of all runs below each other, with the runs' names; without rows if no run has any."""
    plain = cs.numeric() | cs.boolean() | cs.string() | cs.by_dtype(pl.Null)
    tables: dict[Table, pl.DataFrame] = {}
    for name in get_args(Table):
        # Rounds' own returns are read from their records: for a run alone, since a comparison's runs have evaluations.
        reads_episodes = name == "metrics" and len(runs) == 1
        parts = [(arm, read_metrics(run) if reads_episodes else run.table(name)) for (arm, _), run in runs.items()]
        # Adding an arm to a table without columns would make a row.
        named = [table.select(plain, arm=pl.lit(arm)) for arm, table in parts if len(table)]
        tables[name] = pl.concat(named, how="diagonal_relaxed") if named else pl.DataFrame()
    return tables


def _list_resumptions(runs: Runs) -> list[str]:
    """Return where runs were interrupted and went on, but not as if nothing had happened."""
    return [
        f"{arm}{'' if seed is None else f', seed {seed}'}, was interrupted after round {note['after_round']}, and went "
        f"on otherwise than without the interruption: {note.get('reason')}."
        for (arm, seed), run in runs.items()
        for note in run.notes.get("resumed", [])
    ]


def list_latest(run: RunDirectory) -> list[tuple[str, str]]:
    """Return the main figures of a run after its last round; none if it has no round."""
    metrics, evaluations = read_metrics(run), run.table("evaluations")
    if metrics.is_empty():
        return []
    last = metrics.tail(1).to_dicts()[0]
    returns = evaluations["test_return"].drop_nulls().to_list() if has(evaluations, "test_return") else []
    dropped, entropy = last.get("dropped_share"), last.get("train/entropy_loss")
    rewards = {name: value for name, value in last.items() if name.startswith("reward.")}
    test, share_name = ("test", "responses kept") if run.is_language else ("test return", "records kept")
    numbers = [
        ("steps", "{:,}", last.get("timestep")),
        (test, "{:.4g}", returns[-1] if returns else None),
        (f"best {test}", "{:.4g}", max(returns, default=None)),
        ("return of an episode", "{:.4g}", last.get("round_return")),
        ("steps of an episode", "{:.4g}", last.get("round_length")),
        ("return, last 100 episodes", "{:.4g}", last.get("episode_return")),
        ("reward", "{:.4g}", last.get("reward")),
        *((name[7:], "{:.4g}", value) for name, value in rewards.items()),
        ("tokens a response", "{:.4g}", last.get("length")),
        (share_name, "{:.1%}", 1 - dropped if dropped else None),
        ("policy entropy", "{:.3g} nats", None if entropy is None else -entropy),
    ]
    latest = [(name, form.format(value).replace("-", "−")) for name, form, value in numbers if value is not None]
    is_unknown = "episode_return" in metrics.columns and not has(metrics, "episode_return")
    return [*latest, *([("return, last 100 episodes", "none: no Monitor?")] if is_unknown else [])]


def list_facts(config: Mapping[str, Any], runs: Iterable[RunDirectory]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what was run, in groups with headings: plain values, a group for each nested object, versions."""
    config = {name: show(value) for name, value in config.items()}
    if "rule" in config and config.get("objective", "") is None:
        config["objective"] = "the model's"
    tables = {name: value for name, value in config.items() if isinstance(value, Mapping) and value}
    nested = {name: {key: show(entry) for key, entry in value.items()} for name, value in tables.items()}
    plain = {name: value for name, value in config.items() if name not in nested}
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, version in run.versions.items():
            versions.setdefault(package, {})[str(version)] = None
    joined = {package: ", ".join(numbers) for package, numbers in versions.items()}
    groups = [("configuration", plain), *nested.items(), ("versions", joined)]
    return [
        (heading, facts)
        for heading, group in groups
        if (facts := [(name, _format_fact(value)) for name, value in group.items() if value not in (None, {}, [], "")])
    ]


def _format_fact(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(layer, dict) and "class" in layer for layer in value):
        return " < ".join(str(layer["class"]).rpartition(":")[2] for layer in value)  # the environment and its wrappers
    return json.dumps(value, ensure_ascii=False)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
