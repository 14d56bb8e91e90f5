"""What a callback chooses in a round, and what happened in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whence.errors import WhenceError
from whence.influence import Influence
from whence.records import RecordBatch
from whence.selection import Selection


@dataclass(frozen=True)
class RoundResult:
    """What happened in one round; `InfluenceCallback.round` holds the last one's.

    Attributes:
        number: the round's number, from 1.
        records: the rollout.
        influence: the rollout's scores; None if nothing was scored.
        selection: the records that trained.
    """

    number: int
    records: RecordBatch
    influence: Influence | None
    selection: Selection


@dataclass(frozen=True)
class Choice:
    """What `InfluenceCallback.choose` returns.

    Attributes:
        influence: scores of the rollout; None: nothing was scored.
        selection: the records to train on.
        metrics: further columns of the round's metrics; numbers also go to the model's logger, as `influence/NAME`.

    Example: keep the better half by advantage.
        ```
        class BetterHalf(InfluenceCallback):
            def choose(self, records):
                keep = records.advantages >= records.advantages.median()
                return Choice(None, Selection.dropping(keep, "advantage below the median"))
        ```
    """

    influence: Influence | None
    selection: Selection
    metrics: Mapping[str, float | bool | None] = field(default_factory=dict)


def check_selection(selection: object, records: RecordBatch, source: str) -> None:
    """Refuse what is no selection with one entry per record; `source` names the call that returned it."""
    if not isinstance(selection, Selection) or len(selection.keep) != len(records):
        received = f"{len(selection.keep)} records" if isinstance(selection, Selection) else repr(selection)
        raise WhenceError(
            f"{source} returned a selection of {received} for a rollout of {len(records)}; it must return a "
            "whence.Selection with one entry per record."
        )
