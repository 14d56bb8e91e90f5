"""Rounds trained again without some of their records, and how well scores predict what comes of it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import polars as pl
import scipy
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.core import Target, eval_mode, preserve_rng_state
from whence.lab.rounds import check_target, compute_lds, draw_subsets, open_round, reshuffle, retrain
from whence.rounds import RoundRecording
from whence.stored.agents import Evaluate

Scores = Mapping[str, NDArray[np.float64]]
"""(n,) scores of a round's records by name, in the order of the records; a positive one says that the record helps."""

Outcomes = Mapping[str, NDArray[np.float64]]
"""The outcomes of m trainings, (m,), by the outcome's name."""

DRAWS = 8
"""The number of random removals that others are compared with."""


def measure_agreement(values: Float[np.ndarray, "orders m"]) -> float | None:
    """Return the highest rank correlation that a predictor could reach, given how well repeated outcomes agree.

    The mean of k repetitions whose mean rank correlation is r has the reliability `k r / (1 + (k - 1) r)`
    (Spearman-Brown); a predictor of the shared part correlates with it by at most the root.

    Args:
        values: (orders, m) the outcomes of m subsets in at least two repetitions.

    Returns:
        The ceiling, 0 if repetitions do not agree at all; None if all outcomes of a repetition are equal.
    """
    k = len(values)
    if (np.ptp(values, axis=1) == 0).any():
        return None
    ranks = scipy.stats.rankdata(values, axis=1)
    r = max(0.0, float(np.corrcoef(ranks)[np.triu_indices(k, 1)].mean()))
    return float(np.sqrt(k * r / (1 + (k - 1) * r)))


class Study(NamedTuple):
    """How well a round's scores predict.

    Attributes:
        table: a row for each score, truth and outcome: `score`, `truth`, `outcome`, `lds`, `low`, `high`, `ceiling`.
        kept: (m, n) which records each training kept.
        outcomes: for each truth, (orders, m) outcomes, by name.
    """

    table: pl.DataFrame
    kept: Bool[Tensor, "m n"]
    outcomes: Mapping[str, Mapping[str, NDArray[np.float64]]]


def study(
    policy: object,
    recording: RoundRecording,
    scores: Scores,
    *,
    target: Target,
    share: float,
    count: int,
    orders: int,
    evaluate: Evaluate | None = None,
    recorded: bool = True,
    seed: int = 0,
) -> Study:
    """Compare the scores of a round of plain PPO with training it without some of its records.

    There are two truths. "recorded" leaves records out of the recorded minibatches: all else is equal, and nothing is
    random. "reshuffled" shuffles the kept records into full minibatches, as selection does, in several orders. The
    outcomes are the target and the surrogate `mean(rho A)` on the round's own records, and the number that `evaluate`
    returns. A truth's ceiling is what the best predictor could reach, given how well its orders agree: the root of the
    reliability of their mean; 1 if nothing is random. Under "recorded" there is one order, so "evaluated", which may be
    random, has no ceiling there.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        scores: the scores.
        target: the target that the scores are for, and that is measured besides the surrogate.
        share: the share of the records, below 1, that each training keeps.
        count: the number of subsets, at least 3.
        orders: the number of orders of each subset under "reshuffled", at least 2.
        evaluate: measures trained parameters; None: "evaluated" is left out. The recorded truth is its repetition 0,
            the orders are the repetitions from 1, so that orders do not agree because of random numbers they share.
        recorded: whether "recorded" is measured; "reshuffled" is the same with it and without it.
        seed: the seed of subsets and orders.
    """
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    kept = draw_subsets(len(recording.records), share, count, generator)
    outcomes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for truth, repetitions in {**({"recorded": [0]} if recorded else {}), "reshuffled": range(1, orders + 1)}.items():
        runs = []
        for repetition in repetitions:
            trained = _retrain(policy, recording, kept, generator if repetition else None)
            runs.append(measure_outcomes(policy, recording, trained, target, evaluate, repetition))
        outcomes[truth] = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    masks, rows = kept.double().numpy(), []
    for truth, by_outcome in outcomes.items():
        for outcome, values in by_outcome.items():
            # A single order says nothing of chance, which only "evaluated" may depend on.
            ceiling_of_one = None if outcome == "evaluated" else 1.0
            ceiling = measure_agreement(values) if len(values) > 1 else ceiling_of_one
            for name, score in scores.items():
                lds = compute_lds(masks @ score, values.mean(axis=0))
                rows.append({"score": name, "truth": truth, "outcome": outcome, **lds, "ceiling": ceiling})
    numbers = dict.fromkeys(("lds", "low", "high", "ceiling"), pl.Float64)
    return Study(pl.DataFrame(rows, schema_overrides=numbers), kept, outcomes)


def leave_out(
    policy: object,
    recording: RoundRecording,
    scores: Scores,
    *,
    target: Target,
    share: float,
    orders: int,
    evaluate: Evaluate | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    """Train a round of plain PPO without the records that a score ranks highest or lowest, and without random ones.

    The kept records are reshuffled. If a score shows which records help, leaving out its highest lowers the outcomes,
    and leaving out its lowest raises them, by more than leaving out as many at random does.

    Args:
        policy, recording, scores, target, orders, evaluate, seed: see `study`.
        share: the share of the records to leave out, rounded down to whole records.

    Returns:
        A row for each outcome, score and side: `score` (null at random), `side` ("top": the highest were left out;
        "bottom": the lowest; "random"; ties are broken by position), `removed` (the number of records), `truth`
        ("reshuffled"), `outcome`, and `change`: the outcome minus that of training on everything in the same order.
    """
    n = len(recording.records)
    target = check_target(target, open_round(policy, recording))
    generator, count = torch.Generator().manual_seed(seed), int(share * n)
    removals: dict[tuple[str | None, str], Sequence[Tensor]] = {}
    for name, values in scores.items():
        for side, sign in (("top", -1), ("bottom", 1)):
            # The sort is stable, so that of equal scores the first record is left out first.
            removals[name, side] = [torch.from_numpy(np.argsort(sign * values, kind="stable")[:count])]
    removals[None, "random"] = [torch.randperm(n, generator=generator)[:count] for _ in range(DRAWS)]
    kept = torch.ones(1 + sum(map(len, removals.values())), n, dtype=torch.bool)
    dropped = [positions for group in removals.values() for positions in group]
    for mask, positions in zip(kept[1:], dropped, strict=True):
        mask[positions] = False
    changes = []
    for number, order_seed in enumerate(torch.randint(2**62, (orders,), generator=generator).tolist(), start=1):
        # All trainings of an order share its permutations, so that a change is not one of order.
        trained = _retrain(policy, recording, kept, torch.Generator().manual_seed(order_seed))
        outcomes = measure_outcomes(policy, recording, trained, target, evaluate, number)
        changes.append({name: values[1:] - values[0] for name, values in outcomes.items()})
    rows = []
    bounds = np.cumsum([len(group) for group in removals.values()])[:-1]
    for outcome in changes[0]:
        groups = np.split(np.mean([order[outcome] for order in changes], axis=0), bounds)
        about = {"removed": count, "truth": "reshuffled", "outcome": outcome}
        for (score, side), values in zip(removals, groups, strict=True):
            rows.append({"score": score, "side": side, **about, "change": float(values.mean())})
    return pl.DataFrame(rows, infer_schema_length=None)


def intervene(
    policy: object, recording: RoundRecording, scores: Float[Tensor, " n"], *, evaluate: Evaluate, seed: int = 0
) -> pl.DataFrame:
    """Train a round on all its records, without those that score below 0, and without as many drawn at random.

    Each training shuffles the records it keeps into full minibatches in every epoch; all three share the permutations.
    All `n_epochs` are trained, even if `target_kl` ended the round early. See LDA §4.3, C.3; v2 B.3.

    Returns:
        A row for each variant: `order` (1), `variant` ("full", "filtered", "random"), `kept` (the number of records),
        `outcome` and `change` (the outcome minus that of "full"). Both are null if fewer than two records are kept,
        which cannot be trained on.
    """
    generator, below = torch.Generator().manual_seed(seed), scores < 0
    random_ones = torch.ones_like(below)
    # The permutation does not depend on what is dropped.
    random_ones[torch.randperm(len(below), generator=generator)[: int(below.sum())]] = False
    masks = {"full": torch.ones_like(below), "filtered": ~below, "random": random_ones}
    permutations = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
    trainable = [variant for variant, mask in masks.items() if int(mask.sum()) >= 2]
    trained = _retrain(policy, recording, torch.stack([masks[variant] for variant in trainable]), permutations)
    outcomes: dict[str, float] = {}
    for row, variant in enumerate(trainable):
        with _seed_generators(1):
            outcomes[variant] = float(evaluate({name: tensor[row] for name, tensor in trained.items()}, 1))
    rows = [
        {"order": 1, "variant": variant, "kept": int(mask.sum()), "outcome": outcomes.get(variant)}
        for variant, mask in masks.items()
    ]
    table = pl.DataFrame(rows, schema_overrides={"outcome": pl.Float64})
    return table.with_columns(change=pl.col("outcome") - outcomes["full"])


def _retrain(
    policy: object, recording: RoundRecording, kept: Bool[Tensor, "m n"], order: torch.Generator | None
) -> dict[str, Tensor]:
    """Train along the recorded minibatches, or in full ones of an order that a generator draws."""
    update = recording.update
    size = len(recording.records) if update.batch_size is None else update.batch_size
    minibatches = None if order is None else reshuffle(kept, size, update.n_epochs, order)
    return retrain(policy, recording, kept, orders=minibatches)


def measure_outcomes(
    policy: object,
    recording: RoundRecording,
    trained: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
    repetition: int = 0,
) -> Outcomes:
    """Return the outcomes of trainings: "target" and "surrogate" on the round's own records, and "evaluated".

    The surrogate is `mean(rho A)`, with raw advantages. The policy and every random generator are left as they are.
    The arguments are those of `study`; `trained` is what `retrain` returns, and `repetition` seeds the generators.
    """
    round = open_round(policy, recording)
    modules = list(round.view.module.modules())
    rows: list[dict[str, float]] = []
    for number in range(len(next(iter(trained.values())))):
        params = {name: tensor[number] for name, tensor in trained.items()}
        with _seed_generators(repetition), torch.no_grad():
            with eval_mode(modules):
                value = float(target(round.view, params, round.records))
                log_probs = round.view.only({"log_prob"}, params, round.inputs).log_prob
            ratios = (log_probs - round.records.log_probs).exp()
            rows.append({"target": value, "surrogate": float((ratios * round.records.advantages).mean())})
            if evaluate is not None:
                rows[-1]["evaluated"] = evaluate(params, repetition)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def _seed_generators(repetition: int) -> Iterator[None]:
    """Seed global generators by the repetition; on exit they are as before."""
    with preserve_rng_state():
        random.seed(repetition)
        np.random.seed(repetition)
        torch.manual_seed(repetition)
        yield
