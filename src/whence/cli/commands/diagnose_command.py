"""`whence diagnose`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import polars as pl
import typer

from whence.cli.console import console, make_printable, make_table, print_json, print_line
from whence.cli.options import AsJson, ReplayEnv, parse_rounds
from whence.cli.progress import RoundBar
from whence.cli.runs import open_agent_run
from whence.diagnosis import (
    REPEATS,
    SAMPLE,
    Measure,
    calibrate_critic,
    describe_verdict,
    judge_advantages,
    map_extremes,
    read_scored_round,
    summarise_judgement,
)
from whence.errors import WhenceError, suggest
from whence.page.explored_run import ExploredRun
from whence.runs import RunDirectory


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent, finished or not.")],
    rounds: Annotated[
        str | None,
        typer.Option("--rounds", "--round", help="Rounds: 5,20 or 10-50. (default: the last)", show_default=False),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            help=f"Records to judge of each round, over all scores. (default: all by visits, {SAMPLE} by rollouts)",
            min=1,
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        str,
        typer.Option(help=f"visits, rollouts, or auto: visits if states and actions occur {REPEATS} times and more."),
    ] = "auto",
    continuations: Annotated[int, typer.Option(help="Fresh rollouts from each record.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="Of the choice of records and of the rollouts.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Draw a picture (.png), or write the judged records (.parquet).", show_default=False),
    ] = None,
    env: ReplayEnv = None,
    json: AsJson = False,
) -> None:
    """Tell whether the advantages were wrong in the records that harm.

    The advantage that trained a record is compared with a measured one: by repeated visits of the record's state and
    action in the rollout, or by fresh rollouts of the round's policy from the record's rebuilt state.

    Example: whence diagnose runs/lander --rounds 5,20 --records 300
    """
    if measure not in get_args(Measure):
        raise WhenceError(f"--measure is {measure!r}.{suggest(measure, get_args(Measure))}")
    if out is not None and out.suffix.lower() not in (".png", ".parquet"):
        raise WhenceError(f"--out is {out}; its name has to end in .png or .parquet.")
    directory = open_agent_run(run)
    numbers = _choose_rounds(directory, rounds)
    judgements = []
    for number in numbers:
        with RoundBar(f"records of round {number}", f"round {number}", unit="record") as bar:
            judged = judge_advantages(
                directory,
                number,
                records=records,
                continuations=continuations,
                measure=cast(Measure, measure),
                env=env,
                seed=seed,
                on_record=bar.update,
            )
        judgements.append(Judgement(number, judged, summarise_judgement(judged, seed=seed)))
    if out is not None:
        _write(directory, judgements, out, env)
    if json:
        content = [_describe(judgement) for judgement in judgements]
        print_json({"run": str(run), "rounds": content} | ({} if out is None else {"out": str(out)}))
        return
    for judgement in judgements:
        for line in describe_judgement(judgement, len(directory.round("records", judgement.number))):
            print_line(line)
    target = str(directory.config.get("target") or "return")
    if not target.lower().startswith("return"):
        print_line(make_printable(f"Influence is on the target {target} here; LDA's is on the return."))
    _print_tables(judgements)
    if out is not None:
        print_line(f"{'Picture' if out.suffix.lower() == '.png' else 'Records'}: {out}")


@dataclass(frozen=True)
class Judgement:
    """A round that was judged: its number, the records, and what they say."""

    number: int
    judged: pl.DataFrame
    summary: Mapping[str, Any]


def _choose_rounds(run: RunDirectory, text: str | None) -> list[int]:
    numbers = parse_rounds("--rounds", text)
    stored = run.require_rounds(numbers)
    return numbers or stored[-1:]


def _write(run: RunDirectory, judgements: Sequence[Judgement], out: Path, env: str | None) -> None:
    """Write the judged records, or their picture."""
    if out.suffix.lower() == ".parquet":
        from whence.guards import write_atomically

        tables = [each.judged.select(pl.lit(each.number).alias("round"), pl.all()) for each in judgements]
        with write_atomically(out) as temporary:
            pl.concat(tables, how="diagonal_relaxed").write_parquet(temporary)
        return
    from whence.page.pictures.judgement_picture import JudgedRound, draw_judgements

    rounds = []
    for each in judgements:
        table = read_scored_round(run, each.number, env)
        if len(each.judged) == len(table):
            table = table.join(each.judged.select("record_id", "mismatch"), on="record_id", how="left")
        grid = map_extremes(run, each.number, table, env=env)
        rounds.append(JudgedRound(each.number, each.judged, each.summary["spearman"]["mean"], grid))
    draw_judgements(f"{ExploredRun(run, env=env).env_name}  {run.path}", rounds, out)


def describe_judgement(judgement: Judgement, total: int) -> list[str]:
    """Return what a judgement says of a round, in sentences: the answer first.

    Args:
        judgement: the round.
        total: the round's records.
    """
    summary = judgement.summary
    how = "repeated visits" if summary["measured"] == "visits" else "fresh rollouts"
    chosen = f"all {total:,}" if summary["records"] == total else f"{summary['records']:,} of {total:,}"
    lines = [f"Round {judgement.number}: {_answer(summary)} ({chosen} records, judged by {how})"]
    if summary["records"] < total:
        lines.append("  The records are one each, at random, of equal bands of the scores.")
    lines += _describe_bands({row["band"]: row for row in summary["bands"]})
    lines.append(
        f"  Influence and the product of the two advantages: Spearman {_interval(summary['spearman'])}, or "
        f"{_interval(summary['partial'])} at equal size of the trained one. LDA reports that it is positive and strong."
    )
    if summary["measured"] == "visits":
        lines.append(
            "  Visits share their returns with the trained advantages and with the scores, which makes them agree. "
            "Check with --measure rollouts."
        )
    return lines


def _describe_bands(bands: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return how often signs were wrong where records harm and where they help, in sentences."""
    if not {"top", "bottom"} <= bands.keys():
        return []
    bottom, top = bands["bottom"], bands["top"]
    lines = [
        f"  The sign was wrong in {_share(bottom)} of the fifth that harms most, and in {_share(top)} of the fifth "
        "that helps most.",
        f"  Records whose advantage is as large have the wrong sign in {bottom['expected']:.0%} and "
        f"{top['expected']:.0%}, whatever they score.",
    ]
    certain = f"{bottom['certain']:.0%} of the fifth that harms most is measured beyond two errors of 0"
    wrong = bottom["certain_mismatch"]
    lines.append(f"  {certain}{'' if wrong is None else f'; of these, {wrong:.0%} have the wrong sign'}.")
    if bottom["tied"] > 0.05 or top["tied"] > 0.05:
        lines.append(
            f"  {bottom['tied']:.0%} and {top['tied']:.0%} are measured as exactly 0, which counts as a wrong sign."
        )
    return lines


def _answer(summary: Mapping[str, Any]) -> str:
    verdict = describe_verdict(summary)
    if verdict == "yes":
        return "yes, advantages were wrong more often in the records that harm."
    if verdict == "no":
        return "no, advantages were wrong more often in the records that help."
    return "no measurable difference between the records that harm and those that help."


def _share(row: Mapping[str, Any]) -> str:
    interval = "" if row["low"] is None else f" [{row['low']:.0%}, {row['high']:.0%}]"
    return f"{row['mismatch']:.0%}{interval}"


def _interval(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return "–"
    interval = "" if entry["low"] is None else f" [{entry['low']:.2f}, {entry['high']:.2f}]"
    return f"{entry['mean']:.2f}{interval}"


def _print_tables(judgements: Sequence[Judgement]) -> None:
    """Print the bands of every round; of a single round also the critic."""
    rows = [
        [
            *(judgement.number, row["band"], f"{row['records']:,}", _share(row)),
            *(f"{row['distance']:.2g}", f"{row['product']:.2g}", f"{row['size']:.2g}"),
        ]
        for judgement in judgements
        for row in judgement.summary["bands"]
    ]
    headings = ["round", "band", "records", "wrong sign", "|Ā−Â|", "Ā·Â", "|Â|"]
    console.print(make_table("Measured (Ā) and trained (Â) advantages by influence, means", headings, rows))
    if len(judgements) > 1:
        return
    judged = judgements[0].judged
    critic = [
        [f"{row['records']:,}", f"{row['value']:.3g}", f"{row['mc_value']:.3g}"]
        for row in calibrate_critic(judged).to_dicts()
    ]
    console.print(make_table("The critic's values, by tenths", ["records", "value", "measured return"], critic))


def _describe(judgement: Judgement) -> dict[str, Any]:
    """Return a round's judgement in JSON types."""
    critic = calibrate_critic(judgement.judged).to_dicts()
    return {"round": judgement.number, **judgement.summary, "critic": critic}
