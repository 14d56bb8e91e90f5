"""DTV, and how trainers score for rules that bring scores of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from whence.core import (
    MeanObjective,
    Objective,
    RecordBatch,
    Target,
    Unit,
    WhenceError,
    as_target,
    label_units,
    name_owner,
    policy_part,
    rank_units,
    resolve_unit,
    target_name,
)
from whence.scores import Influence
from whence.selection.score_rules import ScoreRule
from whence.selection.selections import START, Progress, Selection, SelectionRule, drop_units

Attribute: TypeAlias = Callable[..., Influence]
"""`attribute(records, target=..., objective=..., leave_one_out=...)`: the scores of records at the present policy."""


@dataclass(frozen=True, repr=False)
class DTV(ScoreRule):
    """Drop the units whose gradient opposes the mean gradient of all units (arXiv 2609.35072).

    A unit's gradient is that of its records' mean objective, without terms of value, entropy and divergence. Its score
    is the product with the mean over the units: `MeanObjective` as target. Responses to one prompt are compared with
    each other alone, and if all of them score below 0 the best of them stays. Advantages are not computed again.

    Attributes:
        unit: what is kept or dropped as one. None: the episode of an agent, the response of a language model.
        leave_one_out: compare a unit with the others alone (DTV-Loo); otherwise its own part of the mean, which is
            above 0, speaks for it.
        warmup: as in `IIF`.
    """

    unit: Unit | None = None  # type: ignore[assignment]
    leave_one_out: bool = False
    warmup: int = 0

    @property
    def target(self) -> MeanObjective:
        """What the scores are of; trainers score by it, whatever the target of other rules."""
        return MeanObjective(self.unit)

    def score(self, records: RecordBatch, objective: Objective, attribute: Attribute) -> Influence:
        """Return the scores of a round's records by the objective of the training; see `Attribute`."""
        settings: dict[str, Any] = {"target": self.target, "objective": policy_part(objective)}
        settings["leave_one_out"] = resolve_unit(records, self.unit) if self.leave_one_out else None
        groups = self._label_groups(records)
        if groups is None:
            return attribute(records, **settings)
        scores = torch.zeros(len(records))
        for group in groups.unique():
            members = (groups == group).nonzero().flatten()
            influence = attribute(records.take(members), **settings)
            scores[members] = influence.scores.float()
        target = f"{influence.target} of a prompt"
        about = replace(influence.provenance, records=records.fingerprint, target=target)
        return Influence(scores, records.ids.cpu().clone(), about)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the units below 0."""
        labels, scores = self._score_units(records, influence)
        dropped = scores < 0
        if (groups := self._label_groups(records)) is not None:
            ranking = rank_units(scores, records, labels)
            for group in groups.unique():
                members = ranking[groups[ranking] == group]
                if dropped[members].all():
                    dropped[members[-1]] = False
        if progress.round <= self.warmup:
            dropped[:] = False
        what = f"gradient{name_owner(resolve_unit(records, self.unit))} opposes the mean of the"
        return drop_units(dropped.nonzero().flatten(), labels, f"{what} {'others' if self.leave_one_out else 'units'}")

    def _label_groups(self, records: RecordBatch) -> Int[Tensor, " n"] | None:
        """Return the groups that records are compared in; None: all with each other."""
        if records.group_ids is None or resolve_unit(records, self.unit) not in ("record", "row"):
            return None
        groups = label_units(records, "group")
        return groups if len(groups.unique()) < len(groups) else None


def find_scorer(rule: SelectionRule) -> Any | None:
    """Return the rule with a method `score` of its own, which may be the one that a control is like; None: neither."""
    return next((each for each in (rule, getattr(rule, "like", None)) if hasattr(each, "score")), None)


def choose_target(rule: SelectionRule, target: Target | None, default: Target) -> Target:
    """Return a trainer's target: the one passed, the default, or the rule's own, next to which none may be passed."""
    scorer = find_scorer(rule)
    if scorer is not None and target is not None:
        raise WhenceError(f"{rule!r} brings its own target: leave out target={target_name(target)}.")
    return as_target(getattr(scorer, "target", None) or default if target is None else target)


def score_for(
    rule: SelectionRule, records: RecordBatch, attribute: Attribute, *, target: Target, objective: Objective
) -> Influence:
    """Return the scores that a rule reads: its own, or those of a trainer's target and objective."""
    scorer = find_scorer(rule)
    if scorer is None:
        return attribute(records, target=target, objective=objective)
    influence: Influence = scorer.score(records, objective, attribute)
    return influence
