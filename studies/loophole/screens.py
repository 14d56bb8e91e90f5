"""Screens: selection rules that drop what a monitor flags, or what a finder ranks highest, and their placebos."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from whence import Influence, RecordBatch, Selection
from whence.lab.language import is_gamed
from whence.selection import Progress


@dataclass(frozen=True)
class Monitor:
    """Drop the responses that a monitor flags: of the gamed ones a share `caught`, of the others a share `mistaken`.

    The tokenizer is the model's; the seed is that of the monitor's errors.
    """

    tokenizer: Any = field(repr=False)
    seed: int
    caught: float = 1.0
    mistaken: float = 0.0
    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Drop what is flagged."""
        gamed = np.array([is_gamed(text) for text in read_responses(records, self.tokenizer)])
        generator = np.random.default_rng([self.seed, progress.round])
        flagged = generator.random(len(gamed)) < np.where(gamed, self.caught, self.mistaken)
        return Selection.dropping(torch.tensor(~flagged), "flagged")


@dataclass(frozen=True)
class Suspects:
    """Drop the share of the responses that raise the target most, where the target is what shall not be learned."""

    share: float = 0.1
    needs_influence = True

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Drop the highest."""
        assert influence is not None
        ranks = influence.scores.argsort(descending=True, stable=True).argsort()
        suspect = (ranks < round(self.share * len(ranks))) & (influence.scores > 0)
        return Selection.dropping(~suspect, "raises the log-probability of gamed answers")


def read_responses(records: RecordBatch, tokenizer: Any) -> list[str]:
    """Return the texts of the responses."""
    columns: Any = records.observations
    masked = torch.where(columns["response_mask"], records.actions, tokenizer.pad_token_id)
    texts: list[str] = tokenizer.batch_decode(masked, skip_special_tokens=True)
    return texts
