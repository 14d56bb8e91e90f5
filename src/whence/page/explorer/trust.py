"""How far the scores of a round can be trusted, in sentences."""

import json
import math
from typing import Any

import polars as pl

from whence.errors import first_line
from whence.influence import SIGNIFICANT
from whence.runs import RunDirectory

GOOD_LDS, FAIR_LDS = 0.7, 0.4
"""From these LDS on, scores are good or fair: at .7 they explain half of the variance of ranks, at .4 a sixth."""

GOOD_SHARE, FAIR_SHARE = 0.3, 0.1
"""From these shares of scores beyond two errors on. By chance, 5% of scores of no influence are beyond them."""

_ADAPTIVE = ("Adam", "AdamW", "RMSprop")


def describe_trust(run: RunDirectory, number: int, records: pl.DataFrame) -> list[dict[str, str]]:
    """Return sentences on how far to trust a round's scores, each with a level: good, fair, poor or unknown.

    Args:
        run: the run.
        number: the round.
        records: its records; without a column `score` nothing is said.
    """
    if "score" not in records.columns:
        return []
    lines = [_describe_lds(run, number), _describe_errors(records)]
    optimizer = run.config.get("optimizer")
    if optimizer in _ADAPTIVE:
        text = (
            f"The run trains with {optimizer}, which rescales every parameter. On LunarLander, the rank correlation of "
            "such scores with training again (LDS) was measured as .60 under Adam and .77 under SGD; 1 is perfect."
        )
        lines.append(("fair", text))
    return [{"level": level, "text": text} for level, text in lines]


def _describe_lds(run: RunDirectory, number: int) -> tuple[str, str]:
    file = run.path / "counterfactual" / f"round_{number:05d}.json"
    if not file.exists():
        command = f"`whence counterfactual {run.path} --round {number}`"
        if run.round_path("recordings", number).exists():
            return "unknown", f"How well these scores predict retraining was not measured. Measure it: {command}"
        return (
            "unknown",
            f"How well these scores predict retraining was not measured. Train with `--record-rounds {number}`, then "
            f"measure it: {command}",
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        row = _choose_row(content["rows"])
        lds, low, high = (None if row[name] is None else float(row[name]) for name in ("lds", "low", "high"))
        outcome = str(row["outcome"])
    except (AttributeError, IndexError, KeyError, OSError, RecursionError, TypeError, ValueError) as broken:
        return "unknown", f"{file} does not hold the results of whence counterfactual: {first_line(broken)}"
    if lds is None or not math.isfinite(lds):
        return "unknown", f"Trained again on subsets of this round, the {outcome} did not vary, so there is no LDS."
    level = "good" if lds >= GOOD_LDS else "fair" if lds >= FAIR_LDS else "poor"
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    text = (
        f"Trained again on subsets of this round's records, the {outcome} follows these scores with a rank correlation "
        f"(LDS) of {lds:.2f}{interval}; 1 would be perfect, 0 chance."
    )
    return level, text


def _choose_row(rows: Any) -> Any:
    """Return the row of the stored score: the snapshot's, on the recorded minibatches, on the target if there."""
    snapshots = [row for row in rows if row["score"] == "snapshot"]
    return sorted(snapshots, key=lambda row: (row["truth"] != "recorded", row["outcome"] != "target"))[0]


def _describe_errors(records: pl.DataFrame) -> tuple[str, str]:
    if "error" not in records.columns or not records["error"].count():
        return "unknown", "The scores have no errors, so that it is not known which differ from 0."
    pairs = records.select("score", "error").drop_nulls()
    share = float((pairs["score"].abs() > SIGNIFICANT * pairs["error"]).mean() or 0.0)  # type: ignore[arg-type]
    level = "good" if share >= GOOD_SHARE else "fair" if share >= FAIR_SHARE else "poor"
    shown = "<1%" if 0 < share < 0.005 else f"{share:.0%}"
    return level, f"{shown} of the scores are beyond two of their standard errors. By chance alone, 5% would be."
