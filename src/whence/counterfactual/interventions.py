"""A recorded round trained again without the records that score below 0 (LDA §4.3, C.3), or without a group."""

from collections.abc import Callable, Mapping, Sequence

import polars as pl
import torch
from jaxtyping import Bool
from torch import Tensor

from whence.core import WhenceError, compute_outputs, eval_mode
from whence.counterfactual.outcomes import Evaluate, check_scores, seed_outcomes
from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.efficiency import t_interval
from whence.influence import Influence
from whence.rounds import RoundRecording, open_round
from whence.selection import read_scores

VARIANTS = ("full", "filtered", "random")
"""What each training keeps: all records, all but those in question, and all but as many drawn at random."""


def intervene(
    policy: object,
    recording: RoundRecording,
    left_out: Influence | Sequence[int],
    *,
    evaluate: Evaluate | None = None,
    orders: int = 1,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on all its records, without some of them, and without as many drawn at random.

    It tests whether harmful records harm, or what records of a kind taught: "these made the policy do this, and it
    returns less since". Each training begins with the round's initial parameters and optimiser state, and shuffles the
    records it keeps into full minibatches in every epoch. In one order all three share the permutations; each order
    draws its own permutations and its own random drop. All `n_epochs` are trained, even if `target_kl` ended the round
    early.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        left_out: scores of exactly the round's records, of which those below 0 are left out; or the ids of a group.
        evaluate: measures trained parameters, for example their test return; the order is the repetition. None:
            "evaluated" is left out.
        orders: the number of trainings of each variant.
        seed: the seed of permutations and random drops.
        memory: bytes that training may hold at a time; see `retrain`.
        on_stage: called with the name of each training and measurement as it begins.

    Returns:
        A row for each order, outcome and variant: `order` (from 1), `variant` ("full", "filtered", "random"), `kept`
        (the number of records), `outcome`, `value` and `change` (the value minus that of "full" in the same order).
        The outcomes are "evaluated" and, of a group, "probability", which the policy gives to what its records did,
        their mean (a density, for continuous actions). Value and change are null if fewer than two records are kept,
        which cannot be trained on. `summarise_changes` gives means and intervals.

    Raises:
        InvalidInfluence: the scores are of other records.
        WhenceError: a group is empty, holds a record that is not in the round, or all but fewer than two; a score is
            not finite, or the round was not trained on.
    """
    measures: dict[str, Evaluate] = {}
    if isinstance(left_out, Influence):
        values = read_scores(recording.records, left_out)
        dropped = values < 0
        check_scores(left_out.provenance.engine, values.double().cpu().numpy(), len(values))
    else:
        dropped = _mask_group(recording, left_out)
        measures["probability"] = _measure_probability(policy, recording, dropped)
    measures |= {} if evaluate is None else {"evaluated": evaluate}
    size, generator = read_batch_size(recording), torch.Generator().manual_seed(seed)
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
        outcomes: dict[tuple[str, str], float] = {}
        for row, variant in enumerate(trainable):
            on_stage(f"measuring {variant}{suffix}")
            trained = {name: tensor[row] for name, tensor in params.items()}
            for outcome, measure in measures.items():
                with seed_outcomes(order):
                    outcomes[outcome, variant] = float(measure(trained, order))
        rows += [
            {"order": order, "variant": variant, "kept": int(mask.sum()), "outcome": outcome}
            | {"value": outcomes.get((outcome, variant))}
            for outcome in measures
            for variant, mask in masks.items()
        ]
    whole = pl.col("value").filter(pl.col("variant") == "full").first()
    table = pl.DataFrame(rows, schema_overrides={"value": pl.Float64})
    return table.with_columns(change=(pl.col("value") - whole).over("order", "outcome"))


def summarise_changes(table: pl.DataFrame) -> pl.DataFrame:
    """Return the mean differences between the variants of `intervene`, with 95% t intervals over orders.

    Args:
        table: what `intervene` returned.

    Returns:
        A row for each outcome and difference: `outcome`, `difference` ("filtered - full", "random - full", "filtered -
        random"), `mean`, and the ends `low` and `high` of its interval; they are null if there is one order.
    """
    rows = []
    for (outcome,), part in table.group_by("outcome", maintain_order=True):
        by_variant = part.pivot("variant", index="order", values="value")
        for one, other in (("filtered", "full"), ("random", "full"), ("filtered", "random")):
            interval = t_interval((by_variant[one] - by_variant[other]).drop_nulls().to_list())
            rows.append({"outcome": outcome, "difference": f"{one} - {other}", **interval})
    schema = {"outcome": pl.String, "difference": pl.String} | dict.fromkeys(("mean", "low", "high"), pl.Float64)
    return pl.DataFrame(rows, schema=schema)


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
        raise WhenceError(f"Record {int(missing[0])} is not in round {recording.number}.")
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
