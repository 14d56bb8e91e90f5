"""What is kept of a round of a language model's training: its rows as a table, its figures as a row."""

from typing import Any

import polars as pl
import torch

from whence.influence import Influence
from whence.llm.rollout import Rollout
from whence.selection import Selection
from whence.tables import add_selection, summarise_selection


def make_response_table(rollout: Rollout, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a row for each response: texts, reward, advantage of its last token, divergence, and what became of it.

    Args:
        rollout: of the round.
        selection: which responses trained.
        influence: their scores; None where the rule needs none.
    """
    drawn, rows = rollout.responses, rollout.rows
    table = pl.DataFrame(
        {
            "record_id": rows.ids.tolist(),
            "prompt": list(drawn.prompts),
            "response": list(drawn.texts),
            "tokens": drawn.response_mask.sum(dim=1).tolist(),
            "ended": drawn.ended.tolist(),
            "reward": rollout.rewards.tolist(),
            "divergence": rollout.divergence.double().tolist(),
            "advantage": rows.advantages.double().tolist(),
            "log_prob": rows.log_probs.double().tolist(),
        }
    )
    return add_selection(table, selection, influence)


def make_metrics_row(
    number: int, rollout: Rollout, selection: Selection, influence: Influence | None
) -> dict[str, Any]:
    """Return a round's row of the metrics, but for what optimisation adds."""
    rewards, keep = rollout.rewards, selection.keep
    return {
        "round": number,
        "reward": float(rewards.mean()),
        "reward_kept": float(rewards[keep].mean()) if keep.any() else None,
        "reward_dropped": float(rewards[~keep].mean()) if (~keep).any() else None,
        "kl": float(rollout.divergence.mean()),
        "train/entropy_loss": -rollout.entropy,
        "length": float(rollout.responses.response_mask.sum(dim=1).double().mean()),
        "ended_share": float(rollout.responses.ended.to(torch.float64).mean()),
        **summarise_selection(selection, influence),
    }
