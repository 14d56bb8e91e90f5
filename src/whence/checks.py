"""Checks on the user's own policy: of every engine against the plain loop, and of some layers' scores against all."""

import time
from collections.abc import Sequence

import polars as pl
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from whence.attribution import attribute
from whence.engines import ENGINES, Refused
from whence.errors import WhenceError, suggest
from whence.layers import Layers, choose_parameters, find_blocks
from whence.objectives import Objective
from whence.policies import Outputs, Params, PolicyView, as_view
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
    return _show(pl.DataFrame(rows, schema=schema), verbose)


def check_layers(
    policy: object,
    records: RecordBatch,
    *,
    layers: Sequence[Layers] | None = None,
    target: Target | None = None,
    objective: Objective | None = None,
    engine: str = "auto",
    memory: int = 2**31,
    verbose: bool = True,
) -> pl.DataFrame:
    """Score the records by some layers alone, and compare the order of the scores with that by all parameters.

    Args:
        policy: see `attribute`.
        records: a round's records, or some of them; the target should be the one that selects.
        layers: what to try, each as in `attribute`; None: the last 1, 2, 4, ... blocks, up to half of them.
        target: what to raise; None: `Return()`.
        objective: what the optimisation raises; None: `PPOClip()`.
        engine: see `attribute`.
        memory: see `attribute`.
        verbose: whether to print the table.

    Returns:
        A table with a row for each choice, that of all parameters first: `layers`; `parameters`, their number;
        `seconds` of scoring, after a first scoring has filled caches; `share`, these seconds divided by those of all;
        `spearman`, the rank correlation with the scores by all; `same_sign`, the share of records whose score has the
        same sign.

    Raises:
        WhenceError: see `attribute`; or the policy has no such layers.
    """
    view = as_view(policy)
    choices: list[Layers | None] = [None, *(list_last_blocks(view.module) if layers is None else layers)]
    parameters = view.parameters()
    chosen = [parameters if each is None else choose_parameters(view.module, parameters, each) for each in choices]
    numbers = [sum(parameters[name].numel() for name in names) for names in chosen]

    def score(choice: Layers | None) -> Tensor:
        influence = attribute(
            view,
            records,
            target=target or Return(),
            objective=objective,
            engine=engine,
            memory=memory,
            layers=choice,
        )
        return influence.scores.double()

    rows, whole, seconds_of_all = [], score(None), 1.0
    for choice, number in zip(choices, numbers, strict=True):
        scores = score(choice)
        start = time.perf_counter()
        score(choice)
        seconds = time.perf_counter() - start
        seconds_of_all = seconds if choice is None else seconds_of_all
        rows.append(
            {
                "layers": _describe_layers(choice),
                "parameters": number,
                "seconds": seconds,
                "share": seconds / seconds_of_all,
                "spearman": rank_agreement(scores, whole),
                "same_sign": float((scores.sign() == whole.sign()).double().mean()),
            }
        )
    return _show(pl.DataFrame(rows), verbose)


def _show(table: pl.DataFrame, verbose: bool) -> pl.DataFrame:
    """Return a table, after printing it if that is asked for."""
    if verbose:
        with pl.Config(tbl_rows=-1, fmt_str_lengths=99, tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True):
            print(table)
    return table


def rank_agreement(scores: Tensor, others: Tensor) -> float:
    """Return Spearman's rank correlation of two sets of scores of the same records; NaN if either is constant."""
    if scores.min() == scores.max() or others.min() == others.max():
        return float("nan")
    return float(spearmanr(scores.numpy(), others.numpy()).statistic)


def list_last_blocks(module: nn.Module) -> list[Layers]:
    """Return the numbers of last blocks to try: 1, 2, 4, ..., up to half of them."""
    count, half = 1, len(find_blocks(module)[1]) // 2
    counts: list[Layers] = []
    while count <= half:
        counts.append(count)
        count *= 2
    return counts


def _describe_layers(layers: Layers | None) -> str:
    if layers is None:
        return "all"
    if isinstance(layers, int):
        return f"last {layers} block{'s' if layers > 1 else ''}"
    return layers if isinstance(layers, str) else ", ".join(layers)


class _MeanLogProb:
    """A target for any view, including one with several log-probs per record."""

    reads = frozenset(["log_prob"])

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        return outputs.log_prob.mean()

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Tensor:
        return self.from_outputs(view(params, view.prepare(records)), records)
