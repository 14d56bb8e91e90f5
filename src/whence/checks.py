"""A check of every engine against the plain loop, on the user's own policy."""

import time
from collections.abc import Sequence

import polars as pl
import torch
from torch import Tensor

from whence.attribution import attribute
from whence.engines import ENGINES, Refused
from whence.errors import WhenceError, suggest
from whence.objectives import Objective
from whence.policies import Outputs, Params, PolicyView
from whence.records import RecordBatch
from whence.targets import Return, Target


def check_engines(
    policy: object,
    records: RecordBatch,
    *,
    target: Target | None = None,
    objective: Objective | None = None,
    engines: Sequence[str] | None = None,
    verbose: bool = True,
) -> pl.DataFrame:
    """Score the records with every engine, and compare each with `loop`, which differentiates record by record.

    Use it on your own policy, with about a hundred records: the loop takes about a millisecond for each.

    Args:
        policy: see `attribute`.
        records: a round's records, or some of them: `records.take(slice(0, 100))`.
        target: what to raise; None: `Return()`.
        objective: what the optimisation raises; None: `PPOClip()`.
        engines: names of engines; None: all.
        verbose: whether to print the table.

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

    target = target or Return()

    def score(engine: str) -> Tensor:
        return attribute(policy, records, target=target, objective=objective, engine=engine).scores.double()

    def score_with_another(engine: str) -> Tensor:
        # For several targets the ghost engine also uses `gradient` of its rules.
        both: dict[str, Target] = {"this": target, "another": _MeanLogProb()}
        return attribute(policy, records, target=both, objective=objective, engine=engine)["this"].scores.double()

    start = time.perf_counter()
    truth = score("loop")
    seconds_of_loop = time.perf_counter() - start
    largest = float(truth.abs().max())
    rows = []
    for name in names:
        row: dict[str, object] = {"engine": name, "difference": None, "seconds": None, "refused": None}
        if name == "loop":
            row |= {"difference": 0.0, "seconds": seconds_of_loop}
        else:
            try:
                with_another = score_with_another(name)
                start = time.perf_counter()
                scores = score(name)
                row |= {"seconds": time.perf_counter() - start}
                difference = max(float((each - truth).abs().max()) for each in (scores, with_another))
                row |= {"difference": difference / largest if largest else difference}
            except (Refused, NotImplementedError, RuntimeError) as refusal:
                # functorch raises nothing more specific than RuntimeError for what it cannot do.
                if isinstance(refusal, torch.OutOfMemoryError) or (type(refusal) is RuntimeError and name != "vmap"):
                    raise
                row |= {"refused": str(refusal)}
        rows.append(row)
    schema = {"engine": pl.String, "difference": pl.Float64, "seconds": pl.Float64, "refused": pl.String}
    table = pl.DataFrame(rows, schema=schema)
    if verbose:
        with pl.Config(
            tbl_rows=-1, fmt_str_lengths=200, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True
        ):
            print(table)
    return table


class _MeanLogProb:
    """A target for any view, including one with several log-probs per record."""

    reads = frozenset(["log_prob"])

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        return outputs.log_prob.mean()

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Tensor:
        return self.from_outputs(view(params, view.prepare(records)), records)
