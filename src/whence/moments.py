"""Moments: stretches of an episode whose records score alike; and scores by group."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl


@dataclass(frozen=True)
class Moment:
    """A stretch of one episode whose records score alike in sign; its face is the record of the largest |score|.

    Attributes:
        record_id: the face's.
        episode_id: the episode, or None.
        env_index: the environment, or None.
        step: the face's position in the episode, or None.
        first_step: of the stretch, or None.
        last_step: of the stretch, or None.
        records: in the stretch.
        dropped: of them, those that did not train.
        score: the face's.
        error: the score's standard error, or None.
        total: sum of the stretch's scores.
        action: the face's.
        advantage: the face's.
        value: the face's, or None.
        return_: the face's, or None.
        reward: the face's, or None.
        record_ids: of the stretch, in time order.
    """

    record_id: int
    episode_id: int | None
    env_index: int | None
    step: int | None
    first_step: int | None
    last_step: int | None
    records: int
    dropped: int
    score: float
    error: float | None
    total: float
    action: Any
    advantage: float
    value: float | None
    return_: float | None
    reward: float | None
    record_ids: tuple[int, ...]


def find_moments(records: pl.DataFrame, *, lowest: bool, most: int) -> list[Moment]:
    """Return the most harmful or the most helpful moments, by the face's score.

    Args:
        records: a round's records, with `record_id` and `score`.
        lowest: the most harmful ones.
        most: how many at most.
    """
    if "score" not in records.columns:
        return []
    has_steps = {"episode_id", "step"} <= set(records.columns)
    keys = [name for name in ("env_index", "episode_id", "step") if name in records.columns] if has_steps else []
    table = records.sort(*keys, "record_id", nulls_last=True)
    scores = table["score"].fill_null(0.0).to_numpy().astype(float)
    episodes = table["episode_id"].fill_null(-1).to_numpy() if has_steps else np.full(len(table), -1)
    steps = table["step"].fill_null(-1).to_numpy() if has_steps else np.full(len(table), -1)
    towards = -1.0 if lowest else 1.0
    taken = np.zeros(len(table), dtype=bool)
    moments: list[Moment] = []
    for face in np.argsort(-towards * scores, kind="stable"):
        if len(moments) == most or towards * scores[face] <= 0:
            break
        if taken[face]:
            continue
        first = last = int(face)
        for direction in (-1, 1):
            at = int(face) + direction
            while (
                0 <= at < len(scores)
                and not taken[at]
                and episodes[at] == episodes[face] != -1
                and steps[at] - steps[at - direction] == direction
                and towards * scores[at] >= 0.5 * abs(scores[face])
            ):
                first, last = min(first, at), max(last, at)
                at += direction
        taken[first : last + 1] = True
        moments.append(_make_moment(table[first : last + 1], int(face) - first))
    return moments


def _make_moment(stretch: pl.DataFrame, face: int) -> Moment:
    row = stretch.row(face, named=True)
    steps = stretch["step"] if "step" in stretch.columns else pl.Series([None])
    dropped = int((~stretch["keep"].fill_null(True)).sum()) if "keep" in stretch.columns else 0
    return Moment(
        record_id=row["record_id"],
        episode_id=row.get("episode_id"),
        env_index=row.get("env_index"),
        step=row.get("step"),
        first_step=steps[0],
        last_step=steps[-1],
        records=len(stretch),
        dropped=dropped,
        score=row["score"],
        error=row.get("error"),
        total=float(stretch["score"].sum()),
        action=row.get("action"),
        advantage=row.get("advantage") or 0.0,
        value=row.get("value"),
        return_=row.get("return"),
        reward=row.get("reward"),
        record_ids=tuple(stretch["record_id"].to_list()),
    )


def group_scores(records: pl.DataFrame, by: str, *, labels: list[str] | None = None, most: int = 12) -> pl.DataFrame:
    """Return mean scores by group, the lowest mean first.

    Args:
        records: a round's records with scores.
        by: "action" or "episode".
        labels: names of discrete actions.
        most: groups at most.
    """
    column = {"action": "action", "episode": "episode_id"}[by]
    key = pl.col(column).cast(pl.String)
    if by == "action" and labels:
        key = key.replace({str(index): label for index, label in enumerate(labels)})
    kept = pl.col("keep") if "keep" in records.columns else pl.lit(True)
    score = pl.col("score")
    return (
        records.group_by(group=key)
        .agg(
            records=pl.len(),
            mean=score.mean(),
            error=score.std() / pl.len().sqrt(),
            share_negative=(score < 0).mean(),
            total=score.sum(),
            dropped_share=(~kept).mean(),
        )
        .sort("mean")
        .head(most)
    )
