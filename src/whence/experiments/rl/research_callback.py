"""The callback of studies: it varies the score, the normalisation of advantages, and whether a guard decides."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from whence.errors import WhenceError
from whence.experiments.rl.scoring import Scoring
from whence.experiments.rl.trial import (
    AdvantageNormalisation,
    Trial,
    check_advantage_norm,
    held_out_gain,
    normalise_advantages,
)
from whence.influence import Influence
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.rounds import DRAWS
from whence.rounds.smoothed import SMOOTHED
from whence.sb3.callback import InfluenceCallback
from whence.sb3.recorder import check_groups, check_steps
from whence.sb3.results import Choice
from whence.selection import KeepAll, Selection, SelectionRule
from whence.targets import Target


class ResearchCallback(InfluenceCallback):
    """`InfluenceCallback` with further options, none of which trained measurably better in our studies.

    With a guard, the model's logger also gets `influence/held_out_gain` and `influence/fell_back`.

    Args:
        rule: see `InfluenceCallback`.
        target: see `InfluenceCallback`.
        objective: see `InfluenceCallback`; not with a method of `attribute_round`.
        engine: see `InfluenceCallback`; not with a method of `attribute_round`.
        memory: bytes that scoring may hold at a time; see `attribute` and `attribute_round`.
        method: "snapshot"; "crossfit", which leaves each record out of the target it is scored by; or a method of
            `attribute_round`, which scores a trial of the whole round.
        draws: trainings that the method "smoothed" averages; under Adam 64 predict better, at four times the cost.
        guard: train on everything in rounds in which selecting does not pay, judged by held-out episodes of the same
            rollout (see `held_out_gain`). It costs two extra trainings a round, whole-round scores are computed twice,
            and it takes no environment step.
        keep_flat: train on every record of a flat round; see `FlatRoundDetector`.
        advantage_norm: "minibatch" as SB3 does it, or "buffer": once over the rollout, before anything is dropped.
        options: further arguments of `InfluenceCallback`.

    Raises:
        WhenceError: an argument is not what it should be, or has no effect; or see `InfluenceCallback`.
    """

    def __init__(
        self,
        rule: SelectionRule,
        *,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        memory: int = 2**31,
        method: str = "snapshot",
        draws: int = DRAWS,
        guard: bool = False,
        keep_flat: bool = False,
        advantage_norm: AdvantageNormalisation = "minibatch",
        **options: Any,
    ) -> None:
        super().__init__(rule, target=target, objective=objective, engine=engine, memory=memory, **options)
        check_advantage_norm(advantage_norm)
        self.scoring = Scoring.create(method, target, objective, engine, draws, memory)
        if advantage_norm == "buffer" and self.recordings:
            raise WhenceError(
                "advantage_norm='buffer' trains on normalised advantages. Recordings would hold these, but targets "
                "read raw ones. Leave out advantage_norm or recordings."
            )
        self.guard, self.keep_flat, self.advantage_norm = guard, keep_flat, advantage_norm

    def check_model(self) -> None:
        """Refuse a model that cannot be trained in this way, or of which the method or the guard could make no trial.

        Raises:
            Unsupported: see `InfluenceCallback`, `check_groups` and `check_steps`.
        """
        super().check_model()
        if self.guard or self.scoring.of_round:
            remedy = "Leave the guard out and take method='snapshot' or 'crossfit'"
            check_groups(self.model, f"the guard and scores of whole rounds need one. {remedy}")
        if self.scoring.of_round:
            check_steps(self.model)

    def choose(self, records: RecordBatch) -> Choice:
        """Score by the method and select; with a guard, keep everything if selecting does not pay."""
        trial = Trial(
            self.model,
            number=self.next_round,
            remaining=self.progress_remaining,
            last=self.last,
            advantage_norm=self.advantage_norm,
        )

        def choose_among(among: Tensor) -> tuple[Influence | None, Selection]:
            influence = self.scoring.influence(trial, records, among) if self.rule.needs_influence else None
            return influence, self.select(records if bool(among.all()) else records.take(among), influence)

        influence, selection = choose_among(torch.ones(len(records), dtype=torch.bool))
        if not self.guard:
            return Choice(influence, selection)
        if selection.uniform and bool(selection.keep.all()):
            return Choice(influence, selection, {"held_out_gain": None, "fell_back": False})
        gain = held_out_gain(trial, records, lambda among: choose_among(among)[1])
        pays = gain >= 0  # False for NaN: too few records were left to judge by
        selection = selection if pays else KeepAll().select(records)
        return Choice(influence, selection, {"held_out_gain": gain, "fell_back": not pays})

    def select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        """Return the rule's selection, or everything in a flat round that is to be kept whole."""
        if self.keep_flat and self._flat.is_flat:
            return KeepAll().select(records)
        return super().select(records, influence)

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on the selected records, on advantages as `advantage_norm` says."""
        with normalise_advantages(self.model) if self.advantage_norm == "buffer" else nullcontext():
            super().train_selected(train, selection)

    def settings(self) -> dict[str, Any]:
        """Return how records are scored and selected, in JSON types."""
        scoring = self.scoring
        return super().settings() | {
            "method": scoring.method,
            **({"draws": scoring.draws} if scoring.method == SMOOTHED else {}),
            "guard": self.guard,
            "keep_flat": self.keep_flat,
            "advantage_norm": self.advantage_norm,
        }
