"""One step of torch's optimisers as a function of gradients and state: differentiable, and batched by `vmap`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from whence.errors import Unsupported, suggest
from whence.rounds.recording import OptimizerState

State = Mapping[str, Tensor]
"""What an optimiser keeps of all parameters, laid end to end, by its names in torch."""


def check_optimizer(optimizer: OptimizerState) -> None:
    """Refuse an optimiser, or a setting of one, whose step is not among these.

    Raises:
        Unsupported: names the optimiser or the setting.
    """
    if optimizer.name not in _STEPS:
        raise Unsupported(
            f"The optimiser {optimizer.name} cannot be replayed step by step.{suggest(optimizer.name, _STEPS)} "
            "SB3's own train() replays any: whence.sb3.replay_round."
        )
    for name in ("maximize", "amsgrad"):
        if optimizer.settings.get(name):
            raise Unsupported(f"{optimizer.name} with {name}=True cannot be replayed step by step; train without it.")


def begin(optimizer: OptimizerState, parameters: Mapping[str, Tensor]) -> State:
    """Return the state before the round, zeros where the optimiser had not stepped on a parameter yet.

    Args:
        optimizer: the recorded one.
        parameters: of the policy, whose order, dtype and device the state takes.

    Returns:
        A vector for each of the optimiser's tensors, and `step`: one number, or, where parameters have been stepped on
        a different number of times, a vector as well.
    """
    keys = _KEYS[optimizer.name](optimizer.settings)
    known = [(parameter, optimizer.state.get(name, {})) for name, parameter in parameters.items()]
    found = {
        key: torch.cat([own[key].to(p).flatten() if key in own else torch.zeros_like(p).flatten() for p, own in known])
        for key in keys
    }
    counts = [_count(optimizer, own).to(parameter) for parameter, own in known]
    if all(bool(count == counts[0]) for count in counts):
        return {"step": counts[0], **found}
    of_each = [count.expand(p.numel()) for count, p in zip(counts, parameters.values(), strict=True)]
    return {"step": torch.cat(of_each), **found}


def _count(optimizer: OptimizerState, own: Mapping[str, Tensor]) -> Tensor:
    if optimizer.name == "SGD":  # keeps no count, and begins its momentum with the first gradient
        return torch.ones(()) if "momentum_buffer" in own else torch.zeros(())
    return own.get("step", torch.zeros(()))


def step(optimizer: OptimizerState, params: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Return parameters, laid end to end, and state after one step; what came is left as it is."""
    return _STEPS[optimizer.name](optimizer.settings, params, gradient, state)


def preconditioner(optimizer: OptimizerState, state: State) -> Tensor:
    """Return what a gradient is multiplied by, beside the learning rate, given the state after the step."""
    settings = optimizer.settings
    if optimizer.name in ("Adam", "AdamW"):
        root = _root(state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"]))
    elif optimizer.name == "RMSprop":
        root = _rms(settings, state)
    else:
        return torch.ones_like(state["step"])
    eps: float = settings["eps"]
    return (root + eps).reciprocal()


def momentum(optimizer: OptimizerState, state: State) -> tuple[float, float | Tensor, float]:
    """Return (now, a, b): a gradient enters the m-th update after its own with `a b^m`, and its own with `now` more.

    Adam's are before the correction of its bias; see `correction`.

    Args:
        optimizer: the recorded one.
        state: before the gradient's own step.
    """
    settings = optimizer.settings
    if optimizer.name in ("Adam", "AdamW"):
        return 0.0, 1 - settings["betas"][0], settings["betas"][0]
    decay = settings.get("momentum", 0.0)
    if settings.get("nesterov"):  # which has no dampening
        return 1.0, decay, decay
    if not decay or not settings.get("dampening"):
        return 0.0, 1.0, decay
    # Momentum begins with its first gradient as it is.
    return 0.0, torch.where(state["step"] > 0, 1 - settings["dampening"], 1.0), decay


def gathers_scaled(optimizer: OptimizerState) -> bool:
    """Return whether momentum gathers gradients that are scaled already, as RMSprop's does.

    Adam's is scaled as it stands at each update, by what `preconditioner` says of that one; SGD scales nothing.
    """
    return optimizer.name == "RMSprop"


def correction(optimizer: OptimizerState, state: State) -> Tensor:
    """Return what an update divides the gradients it carries by, given the state after the step: 1 but for Adam."""
    if optimizer.name in ("Adam", "AdamW"):
        return 1 - torch.as_tensor(optimizer.settings["betas"][0] ** state["step"])
    return torch.ones_like(state["step"])


def _root(squares: Tensor) -> Tensor:
    # The root's derivative at 0 is infinite; where all gradients were 0 so is what it is multiplied by.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def _adam(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings.get("decoupled_weight_decay"):
        return _adamw(settings, p, g, state)
    return _adam_step(settings, p, g + settings["weight_decay"] * p if settings["weight_decay"] else g, state)


def _adamw(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    return _adam_step(settings, p * (1 - settings["lr"] * settings["weight_decay"]), g, state)


def _adam_step(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    b1, b2 = settings["betas"]
    count = state["step"] + 1
    mean, square = state["exp_avg"].lerp(g, 1 - b1), b2 * state["exp_avg_sq"] + (1 - b2) * g * g
    size = settings["lr"] / (1 - b1**count)
    scale = _root(square) / (1 - b2**count).sqrt() + settings["eps"]
    return p - size * mean / scale, {"step": count, "exp_avg": mean, "exp_avg_sq": square}


def _sgd(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings["weight_decay"]:
        g = g + settings["weight_decay"] * p
    kept = dict(state)
    if settings["momentum"]:
        later = settings["momentum"] * state["momentum_buffer"] + (1 - settings["dampening"]) * g
        buffer = torch.where(state["step"] > 0, later, g)
        g = g + settings["momentum"] * buffer if settings["nesterov"] else buffer
        kept["momentum_buffer"] = buffer
    return p - settings["lr"] * g, {**kept, "step": state["step"] + 1}


def _rmsprop(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings["weight_decay"]:
        g = g + settings["weight_decay"] * p
    alpha = settings["alpha"]
    kept = {**state, "step": state["step"] + 1, "square_avg": alpha * state["square_avg"] + (1 - alpha) * g * g}
    if settings["centered"]:
        kept["grad_avg"] = state["grad_avg"].lerp(g, 1 - alpha)
    move = g / (_rms(settings, kept) + settings["eps"])
    if settings["momentum"]:
        move = kept["momentum_buffer"] = settings["momentum"] * state["momentum_buffer"] + move
    return p - settings["lr"] * move, kept


def _rms(settings: Mapping[str, Any], state: State) -> Tensor:
    centre = state["grad_avg"] ** 2 if settings["centered"] else 0.0
    return _root(state["square_avg"] - centre)


_Step = Callable[[Mapping[str, Any], Tensor, Tensor, State], tuple[Tensor, State]]

_STEPS: Mapping[str, _Step] = {"Adam": _adam, "AdamW": _adamw, "RMSprop": _rmsprop, "SGD": _sgd}

_KEYS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "Adam": lambda settings: ["exp_avg", "exp_avg_sq"],
    "AdamW": lambda settings: ["exp_avg", "exp_avg_sq"],
    "RMSprop": lambda settings: [
        "square_avg",
        *(["grad_avg"] if settings["centered"] else []),
        *(["momentum_buffer"] if settings["momentum"] else []),
    ],
    "SGD": lambda settings: ["momentum_buffer"] if settings["momentum"] else [],
}
