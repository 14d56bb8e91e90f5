"""Tables of a round of a language model's training: a row per response, and a row of metrics."""

from typing import Any

import polars as pl
import torch

from whence.influence import Influence
from whence.llm.rollout import Rollout
from whence.records import RecordBatch
from whence.selection import Selection
from whence.tables import add_selection, summarise_selection


def make_response_table(rollout: Rollout, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a row for each response: texts, reward, divergence, advantage of its last token, score and selection.

    Args:
        rollout: the round's rollout.
        selection: the responses that train.
        influence: the responses' scores; None if the rule needs none.
    """
    responses, rows = rollout.responses, rollout.rows
    table = pl.DataFrame(
        {
            "record_id": rows.ids.tolist(),
            "prompt": list(responses.prompts),
            "response": list(responses.texts),
            "tokens": responses.response_mask.sum(dim=1).tolist(),
            "ended": responses.ended.tolist(),
            "reward": rollout.rewards.tolist(),
            "divergence": rollout.divergence.double().tolist(),
            "advantage": rows.advantages.double().tolist(),
            "log_prob": rows.log_probs.double().tolist(),
        }
    )
    return add_selection(table.with_columns(list_tokens(rows)), selection, influence)


def list_tokens(rows: RecordBatch) -> list[pl.Series]:
    """Return columns with a list for each row: `prompt_ids` and `response_ids`, from which a round is built again.

    Args:
        rows: the rows.
    """
    columns: Any = rows.observations
    ids, attended = columns["input_ids"].cpu(), columns["attention_mask"].cpu().bool()
    width = columns["response_mask"].shape[1]
    prompts = [row[mask].tolist() for row, mask in zip(ids[:, :-width], attended[:, :-width], strict=True)]
    responses = [row[mask].tolist() for row, mask in zip(ids[:, -width:], attended[:, -width:], strict=True)]
    lists = {"prompt_ids": prompts, "response_ids": responses}
    return [pl.Series(name, values, dtype=pl.List(pl.Int32)) for name, values in lists.items()]


def make_metrics_row(
    number: int, rollout: Rollout, selection: Selection, influence: Influence | None
) -> dict[str, Any]:
    """Return a round's row of metrics, without those of the optimisation."""
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
