"""Rewards and advantages of tokens, and objectives of rows: PPO's, a mean over response tokens, GRPO's and RLOO's.

Shapes: n rows, R response tokens; `mask` (n, R) is True at the tokens of a response, including its end-of-text token.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.core import InvalidRecords, Outputs, RecordBatch, WeightedTerms, WhenceError
from whence.llm.base import last_token


def masked_mean(values: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]) -> Float[Tensor, " n"]:
    """Return each row's mean over its response tokens; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def surrogate(
    log_probs: Float[Tensor, "n R"],
    old_log_probs: Float[Tensor, "n R"],
    advantages: Float[Tensor, "n R"],
    clip_range: float,
    highest: float | None = None,
) -> Float[Tensor, "n R"]:
    """Return PPO's clipped objective of each token, to be raised; `highest` is the clip range above 1, if another."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if highest is None else highest))
    return torch.minimum(ratio * advantages, clipped * advantages)


def value_loss(
    values: Float[Tensor, "n R"],
    old_values: Float[Tensor, "n R"],
    returns: Float[Tensor, "n R"],
    clip_range: float | None,
) -> Float[Tensor, "n R"]:
    """Return half the squared error of each token's value, or of the clipped value, whichever is more."""
    error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def reward_tokens(
    scores: Float[Tensor, " n"], penalty: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]
) -> Float[Tensor, "n R"]:
    """Return each token's reward: minus its penalty, plus the row's score at the last response token.

    A row without a response token gets no reward.
    """
    rewards = torch.where(mask, -penalty, 0.0)
    last = last_token(mask)
    rows = mask.any(dim=1)
    rewards[rows, last[rows]] += scores[rows].to(rewards)
    return rewards


def whiten(values: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]) -> Float[Tensor, "n R"]:
    """Return values minus their mean over all response tokens, divided by their standard deviation; 0 elsewhere.

    The variance has Bessel's correction, as in TRL.
    """
    chosen = values[mask]
    if len(chosen) < 2:
        return torch.where(mask, values, 0.0)
    return torch.where(mask, (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def gae(
    rewards: Float[Tensor, "n R"],
    values: Float[Tensor, "n R"],
    mask: Bool[Tensor, "n R"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "n R"]:
    """Return generalised advantage estimates of response tokens; the last token ends the episode.

    Response tokens of a row are consecutive, from the first position on. Of rewards see `reward_tokens`; values are of
    the states before the tokens.
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, 0.0)
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages


def _check_columns(records: RecordBatch, *names: str) -> RecordBatch:
    """Return the rows if they have these columns of response tokens."""
    columns = records.observations if isinstance(records.observations, dict) else {}
    if missing := [name for name in ("response_mask", *names) if name not in columns]:
        raise InvalidRecords(
            f"The objective reads `{missing[0]}` of each response token, and these records lack it. Pass it to "
            "whence.llm.make_rows" + (", or set vf_coef=0." if missing[0] in ("values", "returns") else ".")
        )
    return records


@dataclass(frozen=True)
class TokenPPO(WeightedTerms):
    """PPO's clipped objective of each row, to be raised: the mean over its response tokens; 0 for a row without any.

    A token's objective is `min(rho A, clip(rho, 1-eps, 1+eps) A) - vf_coef max((V-R)^2, (V'-R)^2) / 2 + ent_coef H`,
    with `rho` the ratio of its probability to the recorded one, and `V'` the value moved from the recorded one by at
    most `clip_range_vf`. Advantages are not normalised again. LDA's code scores with vf_coef=0.1 (its RLHF runs).

    Attributes:
        clip_range: eps: how far a token's ratio may move from 1 before it is clipped.
        vf_coef: weight of the value loss; 0: no value loss.
        clip_range_vf: how far a value may move from the recorded one; None: without limit.
        ent_coef: weight of the entropy; -log pi of the token is used if the policy gives no entropy.
    """

    clip_range: float = 0.2
    vf_coef: float = 0.0
    clip_range_vf: float | None = 0.2
    ent_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_range", "clip_range_vf"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise WhenceError(f"{name} is {value}; it must be greater than 0 (PPO's usual value: 0.2).")

    def prepare(self, records: RecordBatch) -> RecordBatch:
        """Check that the rows have the columns that are read, and return them unchanged."""
        return _check_columns(records, "log_probs", "advantages", *(["values", "returns"] if self.vf_coef else []))

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each row, (n,)."""
        row: dict[str, Tensor] = records.observations
        value = surrogate(outputs.log_prob, row["log_probs"], row["advantages"], self.clip_range)
        if self.vf_coef:
            if outputs.value is None:
                raise WhenceError(
                    f"vf_coef is {self.vf_coef}, but the model gives no values. Wrap it into WithValueHead, or set "
                    "vf_coef=0."
                )
            value = value - self.vf_coef * value_loss(outputs.value, row["values"], row["returns"], self.clip_range_vf)
        if self.ent_coef:
            value = value + self.ent_coef * (-outputs.log_prob if outputs.entropy is None else outputs.entropy)
        return masked_mean(value, row["response_mask"])


@dataclass(frozen=True)
class GroupObjective:
    """The objective of GRPO and RLOO for each row, at the policy that drew it, where every ratio is 1.

    A token's objective is `c rho A - beta k`, with `rho` the ratio to the current policy and `k` the estimate of the
    divergence from the reference model, `exp(r - l) - (r - l) - 1`, with `r` and `l` the log-probs of the reference and
    of the policy. Other clipping, and all else that TRL's loss types do at other ratios, has no effect there.

    Attributes:
        reduction: how a row's tokens are reduced: to their "mean" (grpo, sapo) or their "sum" (the others; RLOO).
        beta: weight of the divergence.
        corrected: whether a token's divergence is multiplied by its ratio (TRL's `use_bias_correction_kl`).
        level: "token": a token's ratio is its own; "sequence": it is the geometric mean over the row's tokens (TRL's
            `importance_sampling_level`).
        ratio_cap: c, the largest value of a ratio, at most 1: TRL's cispo caps ratios at `epsilon_high`.
    """

    reduction: str = "mean"
    beta: float = 0.0
    corrected: bool = False
    level: str = "token"
    ratio_cap: float = 1.0
    reads: ClassVar[frozenset[str]] = frozenset(["log_prob"])

    def policy_part(self) -> Self:
        """Return the objective without the divergence."""
        return replace(self, beta=0.0)

    def prepare(self, records: RecordBatch) -> RecordBatch:
        """Check that the rows have the columns that are read, and return them unchanged."""
        return _check_columns(records, "advantages", *(["ref_log_probs"] if self.beta else []))

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each row, (n,)."""
        row: dict[str, Tensor] = records.observations
        log_probs, mask = outputs.log_prob, row["response_mask"]
        log_ratio = log_probs - log_probs.detach()
        ratio = (log_ratio if self.level == "token" else masked_mean(log_ratio, mask)[:, None]).exp()
        value = self.ratio_cap * ratio * row["advantages"]
        if self.beta:
            difference = row["ref_log_probs"] - log_probs
            divergence = difference.exp() - difference - 1
            value = value - self.beta * (ratio * divergence if self.corrected else divergence)
        return masked_mean(value, mask) if self.reduction == "mean" else torch.where(mask, value, 0.0).sum(dim=1)


# Loss types that average rows (and have to be rescaled), with how each reduces the tokens of a row; and loss types
# that divide by the number of tokens.
ROW_LOSSES = {"grpo": "mean", "sapo": "mean", "dr_grpo": "sum", "luspo": "sum"}
TOKEN_LOSSES = ("dapo", "cispo", "vespo", "bnpo")


def make_group_objective(args: Any) -> GroupObjective:
    """Return the objective of a completion's training by TRL, at the policy that drew it.

    RLOO's divergence is part of its rewards.
    """
    if not hasattr(args, "loss_type"):
        return GroupObjective("sum", 0.0)
    highest = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return GroupObjective(
        reduction=ROW_LOSSES.get(args.loss_type, "sum"),
        beta=float(args.beta),
        corrected=bool(getattr(args, "use_bias_correction_kl", False)),
        level=args.importance_sampling_level,
        ratio_cap=min(1.0, float(highest)) if args.loss_type == "cispo" else 1.0,
    )
