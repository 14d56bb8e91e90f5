"""What is said of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong with a run, in words.

    Attributes:
        kind: of what it is wrong: "reward", "dynamics", "observation", "episode", "critic", "records" or "setting".
        title: one line: what, where, how much.
        evidence: how sure that is.
        advice: what to do.
        p: the chance to see as much, in all that its kind of search looked at, where nothing is wrong. None: no sample
            but a plain fact, such as a number that never changed, or a setting next to what it did.
        round: the round that shows it; None: no single one.
        record_ids: the records of that round that show it.
    """

    kind: str
    title: str
    evidence: str
    advice: str
    p: float | None = None
    round: int | None = None
    record_ids: tuple[int, ...] = ()
