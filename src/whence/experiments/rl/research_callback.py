"""What studies of selection vary: how records are scored, how advantages are normalised, whether a guard decides."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from whence.errors import WhenceError
from whence.experiments.rl.scoring import Scoring
from whence.experiments.rl.trial import Normalised, Trial, check_normalised, held_out_gain, normalise_advantages
from whence.influence import Influence
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.rounds import DRAWS
from whence.rounds.smoothed import SMOOTHED
from whence.sb3.callback import Choice, InfluenceCallback
from whence.sb3.recorder import check_groups, check_steps
from whence.selection import KeepAll, Selection, SelectionRule
from whence.targets import Target


class ResearchCallback(InfluenceCallback):
    """`InfluenceCallback` with the options that were studied and not seen to train better than its own.

    With a guard, the model's logger also gets `influence/held_out_gain` and `influence/fell_back`.

    Args:
        rule: see `InfluenceCallback`.
        target: see there.
        objective: see there.
        engine: see there.
        memory: bytes that scoring may hold at a time; see `attribute` and `attribute_round`.
        method: "snapshot"; or "crossfit", where no record has a voice in the target it is scored by; or a method of
            `attribute_round`: the round is tried out, trained on in full, scored as a whole, and undone.
        draws: trainings that the method "smoothed" averages; under Adam 64 predict better, at four times the cost.
        guard: train on everything in rounds in which selecting does not pay, judged by held-out episodes of the same
            rollout (see `held_out_gain`). It costs two extra trainings a round, whole-round scores are computed twice,
            and no environment step is taken.
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
        advantage_norm: Normalised = "minibatch",
        **options: Any,
    ) -> None:
        super().__init__(rule, target=target, objective=objective, engine=engine, memory=memory, **options)
        check_normalised(advantage_norm)
        self.scoring = Scoring.checked(method, target, objective, engine, draws, memory)
        if advantage_norm == "buffer" and self.recordings:
            raise WhenceError(
                "advantage_norm='buffer' trains on normalised advantages, which recordings would hold in the place of "
                "the raw ones that targets read. Leave out advantage_norm or recordings."
            )
        self.guard, self.advantage_norm = guard, advantage_norm

    def check_model(self) -> None:
        """Refuse also a model whose round cannot be tried out, where the method or the guard needs that.

        Raises:
            Unsupported: see `InfluenceCallback`, `check_groups` and `check_steps`.
        """
        super().check_model()
        if self.guard or self.scoring.of_round:
            check_groups(self.model)
        if self.scoring.of_round:
            check_steps(self.model)

    def choose(self, records: RecordBatch) -> Choice:
        """Score by the method and select; with a guard, keep everything where selecting does not pay."""
        trial = Trial(self.model, self.next_round, self.progress_remaining, self.last, self.advantage_norm)

        def choose_among(among: Tensor) -> tuple[Influence | None, Selection]:
            influence = self.scoring.influence(trial, records, among) if self.rule.needs_influence else None
            return influence, self.select(records if bool(among.all()) else records.take(among), influence)

        influence, selection = choose_among(torch.ones(len(records), dtype=torch.bool))
        if not self.guard:
            return Choice(influence, selection)
        if selection.uniform and bool(selection.keep.all()):
            return Choice(influence, selection, {"held_out_gain": None, "fell_back": False})
        gain = held_out_gain(trial, records, lambda among: choose_among(among)[1])
        # NaN if a half is left with too little to judge by: then nothing speaks for the selection.
        pays = gain >= 0
        selection = selection if pays else KeepAll().select(records)
        return Choice(influence, selection, {"held_out_gain": gain, "fell_back": not pays})

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on the selected records, on advantages normalised once where that is asked for."""
        with normalise_advantages(self.model) if self.advantage_norm == "buffer" else nullcontext():
            super().train_selected(train, selection)

    def settings(self) -> dict[str, Any]:
        """Return how records are scored and selected, in JSON types."""
        scoring = self.scoring
        return super().settings() | {
            "method": scoring.method,
            **({"draws": scoring.draws} if scoring.method == SMOOTHED else {}),
            "guard": self.guard,
            "advantage_norm": self.advantage_norm,
        }
