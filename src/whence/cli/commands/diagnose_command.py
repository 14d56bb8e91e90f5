"""`whence diagnose`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from whence import experiments
from whence.cli.terminal import (
    AsJson,
    ReplayEnv,
    RoundBar,
    Trust,
    console,
    make_table,
    open_agent_run,
    parse_rounds,
    print_json,
    print_line,
)
from whence.diagnosis import (
    REPEATS,
    SAMPLE,
    Measure,
    describe_verdict,
    judge_advantages,
    summarise_judgement,
)


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
        Measure,
        typer.Option(help=f"auto: visits if states and actions occur {REPEATS} times and more, else rollouts."),
    ] = "auto",
    continuations: Annotated[int, typer.Option(help="Fresh rollouts from each record.", min=2)] = 16,
    env: ReplayEnv = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Tell whether the advantages were wrong in the records that harm.

    The advantage that trained a record is compared with a measured one: by repeated visits of the record's state and
    action in the rollout, or by fresh rollouts of the round's policy from the record's rebuilt state.

    Example: whence diagnose runs/lander --rounds 5,20 --records 300
    """
    directory = open_agent_run(run, trust=trust)
    numbers = parse_rounds("--rounds", rounds)
    stored = directory.require_rounds(numbers)
    summaries: dict[int, dict[str, Any]] = {}
    for number in numbers or stored[-1:]:
        with RoundBar(f"records of round {number}", f"round {number}", unit="record") as bar:
            judged = judge_advantages(
                directory,
                number,
                records=records,
                continuations=continuations,
                measure=measure,
                env=env,
                on_record=bar.update,
            )
        summaries[number] = summarise_judgement(judged)
    if json:
        content = [{"round": number, **summary} for number, summary in summaries.items()]
        print_json({"run": str(run), "rounds": content})
        return
    for number, summary in summaries.items():
        for line in _describe_judgement(number, summary, len(directory.round("records", number))):
            print_line(line)
        if (scale := experiments.read_reward_scale(directory, number)) != 1:
            print_line(
                f"  Advantages are in the environment's rewards, which VecNormalize divided by {scale:.3g} to train."
            )
    target = str(directory.config.get("target") or "return")
    if not target.lower().startswith("return"):
        print_line(f"Influence is on the target {target} here; LDA's is on the return.")
    _print_bands(summaries)


_ANSWERS = {
    "yes": "yes, advantages were wrong more often in the records that harm.",
    "no": "no, advantages were wrong more often in the records that help.",
    "unclear": "no measurable difference between the records that harm and those that help.",
}


def _describe_judgement(number: int, summary: Mapping[str, Any], total: int) -> list[str]:
    """Return what a judgement says of a round with `total` records, in sentences: the answer first."""
    how = "repeated visits" if summary["measured"] == "visits" else "fresh rollouts"
    chosen = f"all {total:,}" if summary["records"] == total else f"{summary['records']:,} of {total:,}"
    lines = [f"Round {number}: {_ANSWERS[describe_verdict(summary)]} ({chosen} records, judged by {how})"]
    bands = {row["band"]: row for row in summary["bands"]}
    if {"top", "bottom"} <= bands.keys():
        bottom, top = bands["bottom"], bands["top"]
        lines += [
            f"  The sign was wrong in {_share(bottom)} of the fifth that harms most, and in {_share(top)} of the fifth "
            "that helps most.",
            f"  Records whose advantage is as large have the wrong sign in {bottom['expected']:.0%} and "
            f"{top['expected']:.0%}, whatever they score.",
        ]
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


def _share(row: Mapping[str, Any]) -> str:
    interval = "" if row["low"] is None else f" [{row['low']:.0%}, {row['high']:.0%}]"
    return f"{row['mismatch']:.0%}{interval}"


def _interval(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return "–"
    interval = "" if entry["low"] is None else f" [{entry['low']:.2f}, {entry['high']:.2f}]"
    return f"{entry['mean']:.2f}{interval}"


def _print_bands(summaries: Mapping[int, Mapping[str, Any]]) -> None:
    rows = [
        [
            *(number, row["band"], f"{row['records']:,}", _share(row)),
            *(f"{row['distance']:.2g}", f"{row['product']:.2g}", f"{row['size']:.2g}"),
        ]
        for number, summary in summaries.items()
        for row in summary["bands"]
    ]
    headings = ["round", "band", "records", "wrong sign", "|Ā−Â|", "Ā·Â", "|Â|"]
    console.print(make_table("Measured (Ā) and trained (Â) advantages by influence, means", headings, rows))
