"""A check on the user's own policy: every engine against the plain loop."""

import time
from collections.abc import Mapping, Sequence

import polars as pl
from torch import Tensor

from whence.core import BatchTarget, Objective, Outputs, RecordBatch, Return, Target, WhenceError, suggest
from whence.engines import ENGINES, Refused
from whence.scores.attribution import attribute


def check_engines(
    policy: object,
    records: RecordBatch,
    *,
    target: Target | None = None,
    objective: Objective | None = None,
    engines: Sequence[str] | None = None,
) -> pl.DataFrame:
    """Score the records with every engine, and compare each with `loop`, which differentiates record by record.

    Use it on your own policy, with about a hundred records: the loop takes about a millisecond for each.

    Args:
        policy: see `attribute`.
        records: a round's records, or some of them: `records.take(slice(0, 100))`.
        target: what to raise; None: `Return()`.
        objective: what the optimisation raises; None: `PPOClip()`.
        engines: names of engines; None: all.

    Returns:
        A table with a row for each engine: `engine`; `difference`, the largest difference from `loop` divided by the
        largest absolute score (rounding causes about 1e-6 in float32); `seconds` of a second scoring, after a first
        one has filled caches; `refused`, why the engine cannot score this policy, or null.

    Raises:
        WhenceError: an engine is unknown, or `loop` itself fails.
    """
    names = list(ENGINES if engines is None else engines)
    if unknown := [name for name in names if name not in ENGINES]:
        raise WhenceError(f"engines holds {unknown[0]!r}.{suggest(unknown[0], ENGINES)}")
    # For several targets the ghost engine also uses `gradient` of its rules.
    alone = {"this": target or Return()}
    both: dict[str, Target] = {**alone, "another": _MeanLogProb()}

    def score(engine: str, targets: Mapping[str, Target]) -> Tensor:
        influences = attribute(policy, records, target=targets, objective=objective, engine=engine)
        return influences["this"].scores.double()

    start = time.perf_counter()
    truth = score("loop", alone)
    seconds_of_loop = time.perf_counter() - start
    largest = float(truth.abs().max()) or 1.0
    rows = []
    for name in names:
        row: dict[str, object] = {"engine": name, "difference": 0.0, "seconds": seconds_of_loop, "refused": None}
        if name != "loop":
            try:
                with_another = score(name, both)
                start = time.perf_counter()
                scores = score(name, alone)
                row["seconds"] = time.perf_counter() - start
                row["difference"] = max(float((each - truth).abs().max()) for each in (scores, with_another)) / largest
            except Refused as refusal:
                row |= {"difference": None, "seconds": None, "refused": str(refusal)}
        rows.append(row)
    schema = {"engine": pl.String, "difference": pl.Float64, "seconds": pl.Float64, "refused": pl.String}
    return pl.DataFrame(rows, schema=schema)


class _MeanLogProb(BatchTarget):
    """A target for any view, including one with several log-probs per record."""

    reads = frozenset(["log_prob"])

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        return outputs.log_prob.mean()
