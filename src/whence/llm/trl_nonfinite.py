"""Numbers that are not finite in TRL's trainers: the training stops and names them, or drops their completions."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import NonFinite
from whence.nonfinite import NOT_FINITE, check_on_nonfinite, measure_norms, nonfinite_path, try_saving
from whence.records import RecordBatch
from whence.selection import Selection

log = logging.getLogger("whence")


class BatchGuard:
    """Checks the numbers of each generation batch of a trainer of `whence.llm.trl`.

    TRL's trainers ignore a reward that is NaN, of a function that does not apply to a completion. So only infinite
    rewards are refused. TRL would turn them into advantages of 0 for the whole group, or of 3e38.

    Args:
        on_nonfinite: "stop" or "drop".
        folder: the run directory; None: no minibatch is saved.

    Raises:
        WhenceError: `on_nonfinite` is neither.

    Attributes:
        infinite: (n,) True for the completions of the last generation batch, of all processes, that were dropped;
            None: none was.
    """

    def __init__(self, on_nonfinite: str, folder: str | Path | None) -> None:
        self.on_nonfinite = check_on_nonfinite(on_nonfinite)
        self._folder = None if folder is None else Path(folder)
        self.infinite: Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether completions and gradients are left out."""
        return self.on_nonfinite == "drop"

    def check_rewards(self, rewards: Tensor, names: Sequence[str], number: int, texts: Sequence[Any]) -> Tensor:
        """Return rewards in which all those of a completion with an infinite one are NaN, by which TRL leaves it out.

        Args:
            rewards: (n, functions) the rewards of all processes' completions.
            names: the functions' names.
            number: the number of the generation batch, from 1.
            texts: this process's completions.

        Raises:
            NonFinite: a reward is infinite, and `on_nonfinite` is "stop".
        """
        self.infinite = None
        infinite = torch.isinf(rewards)
        if not infinite.any():
            return rewards
        rows = infinite.any(dim=1)
        row, column = infinite.nonzero()[0].tolist()
        first = (number - 1) * len(rewards)
        text = f", {str(texts[row])[:80]!r}" if row < len(texts) == len(rewards) else ""
        if not self.drops:
            raise NonFinite(
                f"Round {number}: the reward {names[column]} is {float(rewards[row, column])} for completion {row}"
                f"{text}, record {first + row}. No step was taken. Return a finite number, or None where the function "
                "does not apply; or leave out such completions with on_nonfinite='drop'.",
                record_ids=[first + int(position) for position in rows.nonzero().flatten()],
            )
        log.warning("round %d: %d of %d completions dropped, not finite: reward", number, int(rows.sum()), len(rows))
        self.infinite = rows.cpu()
        return torch.where(rows[:, None], math.nan, rewards)

    def drop_infinite(self, selection: Selection) -> Selection:
        """Return a selection that also drops the completions with an infinite reward."""
        if self.infinite is None:
            return selection
        dropped = self.infinite.tolist()
        reason = NOT_FINITE + "reward"
        reasons = [reason if bad else why for bad, why in zip(dropped, selection.reasons, strict=True)]
        return Selection(selection.keep & ~self.infinite, selection.weights * ~self.infinite, reasons)

    def check_gradient(
        self, model: Any, optimizer: torch.optim.Optimizer | None, loss: Tensor, inputs: Mapping[str, Any], number: int
    ) -> None:
        """Check the loss and the gradients after a backward pass; with "drop", set gradients aside and warn.

        Args:
            model: the model.
            optimizer: torch's optimiser, or None.
            loss: the loss of the pass.
            inputs: TRL's minibatch.
            number: the number of the generation batch, from 1.

        Raises:
            NonFinite: a number is not finite, and `on_nonfinite` is "stop".
        """
        params = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        if not math.isnan(measure_norms([p.grad for _, p in params])) and bool(torch.isfinite(loss)):
            return
        broken = [name for name, p in params if not torch.isfinite(p.grad).all()]
        where = f"gradient is not finite in the parameter `{broken[0]}`" if broken else f"loss is {float(loss)}"
        for _, p in params:
            p.grad = None
        size = len(inputs["completion_ids"])
        text = f"round {number}: the {where} on a minibatch of {size} completions"
        if self.drops:
            log.warning("%s: its gradient is left out, with those accumulated before it in the step", text)
            return
        parameter = broken[0] if broken else None
        message = (
            f"{text[0].upper()}{text[1:]}. The step was not taken: model and optimiser are as before it. Lower the "
            "learning rate, or leave out such gradients with on_nonfinite='drop'."
        )
        path, saved = None, "With run=... the minibatch is saved."
        if self._folder is not None:
            saved, path = try_saving(
                nonfinite_path(self._folder, number),
                "The minibatch, trained parameters and optimiser",
                number=number,
                message=message,
                records=_make_records(inputs),
                policy={name: p for name, p in model.named_parameters() if p.requires_grad},
                optimizer=optimizer,
                parameter=parameter,
            )
        raise NonFinite(f"{message} {saved}", parameter=parameter, path=path)


def _make_records(inputs: Mapping[str, Any]) -> RecordBatch:
    """Return a minibatch's completions as records, with its columns as observations."""
    ids = inputs["completion_ids"]
    columns = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim}
    tensors = {name: value for name, value in columns.items() if len(value) == len(ids)}
    zeros = torch.zeros(len(ids))
    # RecordBatch refuses numbers that are not finite, so the minibatch's own columns are put in unchecked.
    records = RecordBatch(observations=torch.zeros(len(ids), 1), actions=ids, log_probs=zeros, advantages=zeros)
    return records.with_columns({"observations": tensors})
