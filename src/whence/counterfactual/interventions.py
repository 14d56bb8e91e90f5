"""A recorded round trained again without the records that score below 0 (LDA §4.3, C.3), or without a group."""

from collections.abc import Callable, Mapping, Sequence

import polars as pl
import torch
from jaxtyping import Bool
from torch import Tensor

from whence.counterfactual.outcomes import Evaluate, check_scores, seed_outcomes
from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.errors import WhenceError
from whence.guards import eval_mode
from whence.influence import Influence
from whence.metrics import t_interval
from whence.policies import compute_outputs
from whence.rounds import RoundRecording
from whence.rounds.replay import open_round
from whence.selection import read_scores

VARIANTS = ("full", "filtered", "random")
"""What each training keeps: all records, all but those in question, and all but as many drawn at random."""

SCHEMA = {
    "order": pl.Int64,
    "variant": pl.String,
    "kept": pl.Int64,
    "outcome": pl.String,
    "value": pl.Float64,
}


def intervene(
    policy: object,
    recording: RoundRecording,
    scores: Influence,
    evaluate: Evaluate,
    *,
    orders: int = 1,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on all its records, without those that score below 0, and without as many at random.

    Each training begins with the round's initial parameters and optimiser state, and shuffles the records it keeps into
    full minibatches in every epoch. In one order all three share the permutations; each order draws its own
    permutations and its own random drop. All `n_epochs` are trained, even if `target_kl` ended the round early.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        scores: the scores of exactly the round's records.
        evaluate: measures trained parameters, for example their test return; the order is the repetition.
        orders: the number of trainings of each variant.
        seed: the seed of permutations and random drops.
        memory: bytes that training may hold at a time; see `retrain`.
        on_stage: called with the name of each training and measurement as it begins.

    Returns:
        A row for each order and variant: `order` (from 1), `variant` ("full", "filtered", "random"), `kept` (the number
        of records), `outcome` (the number that `evaluate` returned) and `change` (the outcome minus that of "full" in
        the same order). Outcome and change are null if fewer than two records are kept, which cannot be trained on.

    Raises:
        InvalidInfluence: the scores are of other records.
        WhenceError: `orders` is below 1, a score is not finite, or the round was not trained on; or see `retrain`.
    """
    values = read_scores(recording.records, scores)
    check_scores(scores.provenance.engine, values.double().cpu().numpy(), len(values))
    table = _compare_variants(policy, recording, values < 0, {"evaluated": evaluate}, orders, seed, memory, on_stage)
    return table.drop("outcome").rename({"value": "outcome"})


def leave_out_group(
    policy: object,
    recording: RoundRecording,
    group: Sequence[int],
    *,
    evaluate: Evaluate | None = None,
    orders: int = 8,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on all its records, without a group of them, and without as many drawn at random.

    It tests what records of a kind taught: "these made the policy do this, and it returns less since". The trainings
    are those of `intervene`.

    Args:
        policy: see `intervene`, as for `orders`, `seed`, `memory` and `on_stage`.
        recording: the recorded round.
        group: the ids of the records to leave out.
        evaluate: measures trained parameters, for example their test return; None: "evaluated" is left out.
        orders: the number of trainings of each variant.
        seed: of permutations and random drops.
        memory: bytes that training may hold at a time.
        on_stage: called with the name of each stage.

    Returns:
        A row for each order, outcome and variant: `order` (from 1), `variant` ("full", "filtered": without the group,
        "random"), `kept` (the number of records), `outcome`, `value` and `change` (the value minus that of "full" in
        the same order). The outcomes are "probability", which the policy gives to what the group's records did, their
        mean (a density, for continuous actions), and "evaluated". `summarise_changes` gives means and intervals.

    Raises:
        WhenceError: the group is empty, holds a record that is not in the round, or all but fewer than two; `orders` is
            below 1, or the round was not trained on; or see `retrain`.
    """
    dropped = _mask_group(recording, group)
    measures: dict[str, Evaluate] = {"probability": _measure_probability(policy, recording, dropped)}
    measures |= {} if evaluate is None else {"evaluated": evaluate}
    return _compare_variants(policy, recording, dropped, measures, orders, seed, memory, on_stage)


def summarise_changes(table: pl.DataFrame) -> pl.DataFrame:
    """Return the mean differences between the variants of `leave_out_group`, with 95% t intervals over orders.

    Args:
        table: what `leave_out_group` returned.

    Returns:
        A row for each outcome and difference: `outcome`, `difference` ("filtered - full", "random - full", "filtered -
        random"), `mean`, and the ends `low` and `high` of its interval; they are null if there is one order.
    """
    rows = []
    for (outcome,), part in table.group_by("outcome", maintain_order=True):
        values = {
            variant: part.filter(pl.col("variant") == variant).sort("order")["value"].to_numpy() for variant in VARIANTS
        }
        for one, other in (("filtered", "full"), ("random", "full"), ("filtered", "random")):
            interval = t_interval((values[one] - values[other]).tolist())
            rows.append({"outcome": outcome, "difference": f"{one} - {other}", **interval})
    schema = {"outcome": pl.String, "difference": pl.String} | dict.fromkeys(("mean", "low", "high"), pl.Float64)
    return pl.DataFrame(rows, schema=schema)


def _compare_variants(
    policy: object,
    recording: RoundRecording,
    dropped: Bool[Tensor, " n"],
    measures: Mapping[str, Evaluate],
    orders: int,
    seed: int,
    memory: int,
    on_stage: Callable[[str], None],
) -> pl.DataFrame:
    """Train each variant in each order, and return a row for each measure, with its change from "full"."""
    if orders < 1:
        raise WhenceError(f"orders is {orders}; at least 1 is needed.")
    size = read_batch_size(recording)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, object]] = []
    for order in range(1, orders + 1):
        suffix = f", order {order} of {orders}" if orders > 1 else ""
        masks = _draw_masks(dropped, generator)
        shuffle_seed = int(torch.randint(2**62, (1,), generator=generator))
        trainable = [variant for variant, mask in masks.items() if int(mask.sum()) >= 2]
        kept = torch.stack([masks[variant] for variant in trainable])
        on_stage(f"training{suffix}")
        permutations = torch.Generator().manual_seed(shuffle_seed)
        minibatches = reshuffle(kept, size, recording.update.n_epochs, permutations)
        params = retrain(policy, recording, kept, orders=minibatches, memory=memory)
        values: dict[tuple[str, str], float] = {}
        for row, variant in enumerate(trainable):
            on_stage(f"measuring {variant}{suffix}")
            trained = {name: tensor[row] for name, tensor in params.items()}
            for outcome, measure in measures.items():
                with seed_outcomes(order):
                    values[outcome, variant] = float(measure(trained, order))
        rows += [
            {"order": order, "variant": variant, "kept": int(mask.sum()), "outcome": outcome}
            | {"value": values.get((outcome, variant))}
            for outcome in measures
            for variant, mask in masks.items()
        ]
    whole = pl.col("value").filter(pl.col("variant") == "full").first()
    return pl.DataFrame(rows, schema=SCHEMA).with_columns(change=(pl.col("value") - whole).over("order", "outcome"))


def _draw_masks(dropped: Bool[Tensor, " n"], generator: torch.Generator) -> Mapping[str, Bool[Tensor, " n"]]:
    """Return the records that each variant keeps. The permutation drawn does not depend on what is dropped."""
    at_random = torch.randperm(len(dropped), generator=generator)[: int(dropped.sum())]
    random = torch.ones_like(dropped)
    random[at_random] = False
    return dict(zip(VARIANTS, (torch.ones_like(dropped), ~dropped, random), strict=True))


def _mask_group(recording: RoundRecording, group: Sequence[int]) -> Bool[Tensor, " n"]:
    """Return which of a round's records are in a group, by their ids."""
    ids, wanted = recording.records.ids.cpu(), torch.as_tensor(list(group), dtype=torch.int64)
    if len(missing := wanted[~torch.isin(wanted, ids)]):
        raise WhenceError(
            f"Record {int(missing[0])} is not in round {recording.number}, which holds records {int(ids.min())} to "
            f"{int(ids.max())}."
        )
    mask = torch.isin(ids, wanted)
    if not 0 < int(mask.sum()) <= len(mask) - 2:
        raise WhenceError(
            f"The group holds {int(mask.sum())} of the round's {len(mask)} records; at least one is needed, and at "
            "least two others, to train on."
        )
    return mask


def _measure_probability(policy: object, recording: RoundRecording, group: Bool[Tensor, " n"]) -> Evaluate:
    """Return what measures the mean probability of the actions of a group's records."""
    round = open_round(policy, recording)
    modules = list(round.view.module.modules())
    inputs = round.view.prepare(recording.records.take(group.nonzero()[:, 0]))

    def measure(params: Mapping[str, Tensor], _: int) -> float:
        with eval_mode(modules), torch.no_grad():
            log_probs = compute_outputs(round.view, {"log_prob"}, params, inputs).log_prob
        return float(log_probs.double().exp().mean())

    return measure


def mean_change(changes: Sequence[float]) -> Mapping[str, float | int | None]:
    """Return the mean of the changes of several rounds.

    Args:
        changes: one change for each round.

    Returns:
        "mean", and "low" and "high" of its 95% t interval over rounds; "rounds", the number of rounds; and "improved",
        the number of those whose change is above 0. The mean of no round is None, as is the interval of fewer than two.
    """
    return {**t_interval(changes), "rounds": len(changes), "improved": sum(change > 0 for change in changes)}
