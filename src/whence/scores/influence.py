"""The scores of one round's records for one target, and how they were computed."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Self

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import InvalidInfluence, argsort_ascending, parse_document, to_numpy
from whence.runs import read_tensor_file, write_tensor_file

SIGNIFICANT = 2.0
"""A number differs from 0 if it is more than this many of its errors away. By chance, 5% of those of mean 0 do."""


def widen_errors(degrees: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return the factor by which a standard error of few degrees of freedom grows for `SIGNIFICANT` to hold of it.

    The number plus and minus two errors is then its 95% interval by Student's t, however few folds the error is over.
    """
    from scipy.special import stdtrit  # loaded where it is used: a training without errors needs none

    return np.asarray(stdtrit(degrees, 0.975) / SIGNIFICANT)


@dataclass(frozen=True)
class Provenance:
    """What scores were computed from and how. Two influences can be added only if these agree."""

    target: str
    objective: str
    engine: str
    engine_reason: str
    parameters: tuple[str, ...]
    records: str | None = None  # the whole batch's RecordBatch.fingerprint
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Influence:
    """How much training on each record raises a target: positive = helps (LDA §3).

    Attributes:
        scores: (n,) float, on the CPU, in the order of `record_ids`.
        record_ids: (n,) int64.
        provenance: target, objective, engine and why it was chosen, parameters covered, records, versions.
        errors: (n,) standard errors of the scores, by `widen_errors`, or None; see `folds` of `attribute`.
        by_fold: (n, folds) each score by the mean target of each fold of episodes, or None: what errors of groups need.
        folds: (n,) the fold of each record, from 0, or None.
    """

    scores: Float[Tensor, " n"]
    record_ids: Int[Tensor, " n"]
    provenance: Provenance
    errors: Float[Tensor, " n"] | None = None
    by_fold: Float[Tensor, "n folds"] | None = None
    folds: Int[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        shapes = {tuple(column.shape) for column in (self.scores, self.record_ids, self.errors) if column is not None}
        if len(shapes) > 1 or self.scores.ndim != 1:
            raise InvalidInfluence(f"scores, record_ids and errors have the shapes {shapes}; all need (n,).")

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def target(self) -> str:
        """The target, in words."""
        return self.provenance.target

    @property
    def engine(self) -> str:
        """The engine that computed the scores."""
        return self.provenance.engine

    @property
    def engine_reason(self) -> str:
        """Why that engine was chosen."""
        return self.provenance.engine_reason

    def is_significant(self, multiple: float = SIGNIFICANT) -> Bool[Tensor, " n"]:
        """Return (n,) whether each score is further from 0 than `multiple` of its standard errors.

        Raises:
            InvalidInfluence: the scores have no errors.
        """
        if self.errors is None:
            raise InvalidInfluence("These scores have no errors; make them with attribute(..., folds=8).")
        return self.scores.abs() > multiple * self.errors

    def top(self, k: int = 10) -> Self:
        """Return the k records that help most, best first; among equal scores the lower record id comes first."""
        return self._lowest(-self.scores, k)

    def bottom(self, k: int = 10) -> Self:
        """Return the k records that harm most, worst first; among equal scores the lower record id comes first."""
        return self._lowest(self.scores, k)

    def _lowest(self, keys: Tensor, k: int) -> Self:
        if k < 1:
            raise InvalidInfluence(f"k is {k}; it is a number of records, 1 or more.")
        chosen = argsort_ascending(keys, self.record_ids)[:k]
        parts = {name: column[chosen] for name, column in self._error_columns.items()}
        return replace(self, scores=self.scores[chosen], record_ids=self.record_ids[chosen], **parts)  # type: ignore[arg-type]

    def to_polars(self) -> pl.DataFrame:
        """Return a table of `record_id` and `score`; and `error`, `score_folds` and `fold` where there are errors.

        Join it with `RecordBatch.to_polars()` on `record_id`.
        """
        return pl.DataFrame({"record_id": self.record_ids.numpy(), "score": to_numpy(self.scores)}).with_columns(
            self.list_error_columns()
        )

    def list_error_columns(self) -> list[pl.Series]:
        """Return `error`, `score_folds` (the score by each fold's mean target) and `fold`, as far as they are there."""
        series = {"errors": "error", "by_fold": "score_folds", "folds": "fold"}
        return [pl.Series(series[name], to_numpy(column)) for name, column in self._error_columns.items()]

    @property
    def _error_columns(self) -> dict[str, Tensor]:
        columns = {name: getattr(self, name) for name in ("errors", "by_fold", "folds")}
        return {name: column for name, column in columns.items() if column is not None}

    def __add__(self, other: "Influence") -> Self:
        """Return the influence of the same records on the sum of both targets; it has no errors."""
        mine, theirs = self.provenance, other.provenance
        names = ("records", "objective", "parameters")
        differing = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
        if differing or not torch.equal(self.record_ids, other.record_ids):
            raise InvalidInfluence(
                f"These influences differ in their {' and '.join(differing) or 'record_ids'}. Only scores of the same "
                "records under the same objective and parameters add; score both targets in one call of attribute(), "
                "and add before taking top() or bottom()."
            )
        total = replace(mine, target=f"{mine.target} + {theirs.target}")
        # Both errors come from the same episodes, so the sum's does not follow from them.
        parts = dict.fromkeys(self._error_columns)
        return replace(self, scores=self.scores + other.scores, provenance=total, **parts)  # type: ignore[arg-type]

    def save(self, path: str | Path) -> None:
        """Write scores, errors, ids and provenance to one safetensors file, atomically."""
        tensors = {"scores": self.scores, "record_ids": self.record_ids, **self._error_columns}
        provenance = json.dumps(asdict(self.provenance))
        texts = {"format": "whence-influence", "version": "1", "provenance": provenance}
        write_tensor_file(path, tensors, texts)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            InvalidInfluence: the file is damaged, or `save` did not write it.
        """
        metadata, tensors = read_tensor_file(path, InvalidInfluence)
        try:
            if (metadata["format"], metadata["version"]) != ("whence-influence", "1"):
                raise TypeError("it is marked otherwise")
            about = parse_document(f"The header of {path}", metadata["provenance"], InvalidInfluence)
            provenance = Provenance(**{**about, "parameters": tuple(about["parameters"])})
            errors = [tensors.get(name) for name in ("errors", "by_fold", "folds")]
            return cls(tensors["scores"], tensors["record_ids"], provenance, *errors)
        except (KeyError, TypeError) as wrong:
            raise InvalidInfluence(
                f"{path} does not hold what Influence.save writes ({wrong}). Restore it, or score again."
            ) from None

    def __repr__(self) -> str:
        return f"{self._title}\n{self.to_polars()}"

    def _repr_html_(self) -> str:
        table = self.to_polars().sort("score", "record_id")
        ends = table if len(table) <= 10 else pl.concat([table.head(5), table.tail(5)])
        return f"<p>{escape(self._title)}</p>{ends._repr_html_()}"

    @property
    def _title(self) -> str:
        about = self.provenance
        return f"Influence of {len(self)} records on {about.target} (engine {about.engine}; positive = helps)"


def is_significant(score: float | None, error: float | None) -> bool | None:
    """Return whether a score can be told from 0; None if it or its error is not known, or not finite."""
    if score is None or error is None or not math.isfinite(score) or not math.isfinite(error):
        return None
    return bool(abs(score) > SIGNIFICANT * error)
