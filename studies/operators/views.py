"""Faults of what the policy sees."""

from collections import deque
from typing import Any

import numpy as np

from studies.operators.faults import COPIES, ONLY, Fault
from studies.operators.samples import read_entries, write_entries


class LateObservation(Fault):
    """Every observation is one of some steps before; the first one is shown until then."""

    def _begin(self, observation: Any) -> Any:
        self.queue = deque([observation], maxlen=int(self.size) + 1)
        return observation

    def _see(self, observation: Any) -> Any:
        self.queue.append(observation)
        return self.queue[0]


class Stale(Fault):
    """At times, what was shown before is shown again."""

    def _begin(self, observation: Any) -> Any:
        self.last = observation
        return observation

    def _see(self, observation: Any) -> Any:
        self.last = self.last if self._is_drawn(self.size) else observation
        return self.last


class Constant(Fault):
    """At a share of the steps, the very first observation is shown."""

    first: Any = None

    def _see(self, observation: Any) -> Any:
        self.first = observation if self.first is None else self.first
        return self.first if self._is_drawn(self.size) else observation


class Dropout(Fault):
    """At times, the whole observation is zeros."""

    def _see(self, observation: Any) -> Any:
        is_lost = bool(self.size) and self._is_drawn(self.size)
        return write_entries(observation, np.zeros_like(read_entries(observation))) if is_lost else observation


class Entries(Fault):
    """A fault of what is shown of some entries, of which there are `many`."""

    many = 1

    def _prepare(self) -> None:
        chosen = self.sample.list_entries(self.placing)[: self.many]
        self.entries, self.spreads = self.sample.columns[chosen], self.sample.spreads[chosen]

    def _edit(self, values: Any) -> Any:
        """Return what is shown of the entries."""
        raise NotImplementedError

    def _see(self, observation: Any) -> Any:
        if not self.size:
            return observation
        entries = read_entries(observation)
        entries[self.entries] = self._edit(entries[self.entries])
        return write_entries(observation, entries)

    def _describe(self) -> dict[str, Any]:
        return {"entry": int(self.entries[0])}


class Frozen(Entries):
    """As many entries as `size` says keep their value of the reset."""

    def _prepare(self) -> None:
        self.many = int(self.size)
        super()._prepare()

    def _begin(self, observation: Any) -> Any:
        self.values = read_entries(observation)[self.entries] if self.size else None
        return self._see(observation)

    def _edit(self, values: Any) -> Any:
        return self.values


class Zero(Frozen):
    """As many entries as `size` says are 0."""

    def _edit(self, values: Any) -> Any:
        return 0.0


class CopyFrozen(Entries):
    """In one copy an entry does not change any more in a last share of the training."""

    values: Any = None

    def _edit(self, values: Any) -> Any:
        if self.copy == ONLY and self.steps > (1 - self.size) * self.total:
            self.values = values if self.values is None else self.values
            return self.values
        return values

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "copy": ONLY, "step": int((1 - self.size) * self.total)}


class Clip(Entries):
    """All entries are clipped to the range that holds a share `1 - size` of random play."""

    def _prepare(self) -> None:
        self.entries = self.sample.columns
        self.ranges = np.quantile(self.sample.before, [self.size / 2, 1 - self.size / 2], axis=0)

    def _edit(self, values: Any) -> Any:
        return np.clip(values, *self.ranges)

    def _describe(self) -> dict[str, Any]:
        return {}


class EntryDropout(Entries):
    """At times, an entry is 0."""

    def _edit(self, values: Any) -> Any:
        return 0.0 if self._is_drawn(self.size) else values


class ObservationSpike(Entries):
    """At a few steps of all copies, an entry is ten thousand of its spreads."""

    def _prepare(self) -> None:
        super()._prepare()
        self.moments = self.placing.choice(COPIES * self.total, int(self.size), replace=False)

    def _edit(self, values: Any) -> Any:
        return values + 1e4 * self.spreads * ((self.steps - 1) * COPIES + self.copy in self.moments)


class ObservationShift(Entries):
    """In the second half of the training, an entry is shifted by `size` spreads."""

    def _edit(self, values: Any) -> Any:
        return values + self.size * self.spreads * (self.steps > self.total / 2)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "step": self.total // 2}


class ObservationScale(ObservationShift):
    """In the second half of the training, an entry is `1 + size` times as large."""

    def _edit(self, values: Any) -> Any:
        return values * (1 + self.size * (self.steps > self.total / 2))


class CopyObservation(Entries):
    """In one copy, an entry is `1 + size` times as large."""

    def _edit(self, values: Any) -> Any:
        return values * (1 + self.size * (self.copy == ONLY))

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "copy": ONLY}


class UnscaledObservation(Entries):
    """An entry is `1 + size` times as large."""

    def _edit(self, values: Any) -> Any:
        return values * (1 + self.size)


class Noise(Entries):
    """An entry has noise of `size` of its spreads: from 3 on, it is noise."""

    def _edit(self, values: Any) -> Any:
        return values + self.size * self.spreads * self.drawing.normal(size=len(values))
