"""A check for users: every engine against the plain loop, on their own policy."""

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
    """Score the records with every engine, and hold each against `loop`, which differentiates record by record.

    Use it on a policy of your own, with a hundred records or so: the loop takes about a millisecond for each.

    Args:
        policy: see `attribute`.
        records: a round's records, or some of them: `records.take(slice(0, 100))`.
        target: what to raise; None: `Return()`.
        objective: what the optimisation raises; None: `PPOClip()`.
        engines: names of engines; None: all.
        verbose: print the table.

    Returns:
        One row an engine: `engine`; `difference`, the largest difference from `loop` over the largest score's size
        (rounding leaves about 1e-6 in float32); `seconds` of a second scoring, the first one warming caches up;
        `refused`, why it cannot score this policy, else null.

    Raises:
        WhenceError: an engine is unknown, or `loop` itself fails.
    """
    names = list(ENGINES if engines is None else engines)
    if unknown := [name for name in names if name not in ENGINES]:
        raise WhenceError(f"engines holds {unknown[0]!r}.{suggest(unknown[0], ENGINES)}")

    asked = target or Return()

    def score(engine: str) -> Tensor:
        return attribute(policy, records, target=asked, objective=objective, engine=engine).scores.double()

    def score_beside_another(engine: str) -> Tensor:
        # Several targets take another way through the ghost engine, by its rules' other half.
        both: dict[str, Target] = {"asked": asked, "another": _MeanLogProb()}
        return attribute(policy, records, target=both, objective=objective, engine=engine)["asked"].scores.double()

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
                beside_another = score_beside_another(name)
                start = time.perf_counter()
                scores = score(name)
                row |= {"seconds": time.perf_counter() - start}
                apart = max(float((found - truth).abs().max()) for found in (scores, beside_another))
                row |= {"difference": apart / largest if largest else apart}
            except (Refused, NotImplementedError, RuntimeError) as refusal:
                # functorch has no other word than RuntimeError for what it cannot do.
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
    """A target that any view has, also one with several log-probs a record."""

    reads = frozenset(["log_prob"])

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        return outputs.log_prob.mean()

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Tensor:
        return self.from_outputs(view(params, view.prepare(records)), records)
