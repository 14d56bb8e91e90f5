"""One step of torch's optimisers as a function of gradients and state: differentiable, and batched by `vmap`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from whence.core import Unsupported, suggest
from whence.rounds import OptimizerState

State = Mapping[str, Tensor]
"""An optimiser's state of all parameters, flattened into one vector for each of torch's names."""


def safe_sqrt(squares: Tensor) -> Tensor:
    """Return the root of numbers that are not negative; its derivative at 0 is 0, where that of `sqrt` is infinite."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def check_optimizer(optimizer: OptimizerState) -> None:
    """Refuse, by name, an optimiser or a setting of one whose step is not among these."""
    if optimizer.name not in _STEPS:
        raise Unsupported(
            f"The optimiser {optimizer.name} cannot be replayed step by step.{suggest(optimizer.name, _STEPS)} "
            "SB3's own train() replays any: whence.sb3.replay_round."
        )
    for name in ("maximize", "amsgrad"):
        if optimizer.settings.get(name):
            raise Unsupported(f"{optimizer.name} with {name}=True cannot be replayed step by step; train without it.")


def initial_state(optimizer: OptimizerState, parameters: Mapping[str, Tensor]) -> State:
    """Return the state before the round, zeros for parameters that the optimiser had not stepped on yet.

    It has a vector for each of the optimiser's tensors, in the parameters' order, and `step`: one number, or a vector
    if parameters have been stepped on a different number of times.
    """
    keys = [key for key in _KEYS[optimizer.name] if key not in _NEEDS or optimizer.settings[_NEEDS[key]]]
    pairs = [(parameter, optimizer.state.get(name, {})) for name, parameter in parameters.items()]
    vectors = {
        key: torch.cat([old[key].to(p).flatten() if key in old else torch.zeros_like(p).flatten() for p, old in pairs])
        for key in keys
    }
    counts = [_step_count(optimizer, old).to(parameter) for parameter, old in pairs]
    if all(bool(count == counts[0]) for count in counts):
        return {"step": counts[0], **vectors}
    by_parameter = [count.expand(p.numel()) for count, p in zip(counts, parameters.values(), strict=True)]
    return {"step": torch.cat(by_parameter), **vectors}


def _step_count(optimizer: OptimizerState, state: Mapping[str, Tensor]) -> Tensor:
    if optimizer.name == "SGD":  # keeps no count, and begins its momentum with the first gradient
        return torch.ones(()) if "momentum_buffer" in state else torch.zeros(())
    return state.get("step", torch.zeros(()))


def step(optimizer: OptimizerState, params: Tensor, gradient: Tensor, state: State) -> tuple[Tensor, State]:
    """Return the parameters, flattened, and the state after one step; the arguments are left as they are."""
    return _STEPS[optimizer.name](optimizer.settings, params, gradient, state)


def preconditioner(optimizer: OptimizerState, state: State) -> Tensor:
    """Return what a gradient is multiplied by, besides the learning rate, given the state after the step."""
    settings = optimizer.settings
    if optimizer.name in ("Adam", "AdamW"):
        root = safe_sqrt(state["exp_avg_sq"] / (1 - settings["betas"][1] ** state["step"]))
    elif optimizer.name == "RMSprop":
        root = _rmsprop_root(settings, state)
    else:
        return torch.ones_like(state["step"])
    eps: float = settings["eps"]
    return (root + eps).reciprocal()


def momentum_weights(optimizer: OptimizerState, state: State) -> tuple[float, float | Tensor, float]:
    """Return (now, a, b): a gradient enters the m-th update after its own with `a b^m`, and its own with `now` more.

    Adam's weights are those before the correction of its bias; see `bias_correction`. `state` is that before the
    gradient's own step.
    """
    settings = optimizer.settings
    if optimizer.name in ("Adam", "AdamW"):
        return 0.0, 1 - settings["betas"][0], settings["betas"][0]
    decay = settings.get("momentum", 0.0)
    if settings.get("nesterov"):  # which has no dampening
        return 1.0, decay, decay
    if not decay or not settings.get("dampening"):
        return 0.0, 1.0, decay
    # The first gradient enters the momentum undamped.
    return 0.0, torch.where(state["step"] > 0, 1 - settings["dampening"], 1.0), decay


def bias_correction(optimizer: OptimizerState, state: State) -> Tensor:
    """Return what an update divides its momentum by, given the state after the step: 1 except for Adam."""
    if optimizer.name in ("Adam", "AdamW"):
        return 1 - torch.as_tensor(optimizer.settings["betas"][0] ** state["step"])
    return torch.ones_like(state["step"])


def _adam(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings.get("decoupled_weight_decay"):
        p = p * (1 - settings["lr"] * settings["weight_decay"])
    elif settings["weight_decay"]:
        g = g + settings["weight_decay"] * p
    b1, b2 = settings["betas"]
    count = state["step"] + 1
    mean, square = state["exp_avg"].lerp(g, 1 - b1), b2 * state["exp_avg_sq"] + (1 - b2) * g * g
    size = settings["lr"] / (1 - b1**count)
    scale = safe_sqrt(square) / (1 - b2**count).sqrt() + settings["eps"]
    return p - size * mean / scale, {"step": count, "exp_avg": mean, "exp_avg_sq": square}


def _sgd(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings["weight_decay"]:
        g = g + settings["weight_decay"] * p
    after = {**state, "step": state["step"] + 1}
    if settings["momentum"]:
        later = settings["momentum"] * state["momentum_buffer"] + (1 - settings["dampening"]) * g
        buffer = torch.where(state["step"] > 0, later, g)
        g = g + settings["momentum"] * buffer if settings["nesterov"] else buffer
        after["momentum_buffer"] = buffer
    return p - settings["lr"] * g, after


def _rmsprop(settings: Mapping[str, Any], p: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
    if settings["weight_decay"]:
        g = g + settings["weight_decay"] * p
    alpha = settings["alpha"]
    after = {**state, "step": state["step"] + 1, "square_avg": alpha * state["square_avg"] + (1 - alpha) * g * g}
    if settings["centered"]:
        after["grad_avg"] = state["grad_avg"].lerp(g, 1 - alpha)
    move = g / (_rmsprop_root(settings, after) + settings["eps"])
    if settings["momentum"]:
        move = after["momentum_buffer"] = settings["momentum"] * state["momentum_buffer"] + move
    return p - settings["lr"] * move, after


def _rmsprop_root(settings: Mapping[str, Any], state: State) -> Tensor:
    centre = state["grad_avg"] ** 2 if settings["centered"] else 0.0
    return safe_sqrt(state["square_avg"] - centre)


_Step = Callable[[Mapping[str, Any], Tensor, Tensor, State], tuple[Tensor, State]]

_STEPS: Mapping[str, _Step] = {
    "Adam": _adam,
    "AdamW": lambda settings, *tensors: _adam({**settings, "decoupled_weight_decay": True}, *tensors),
    "RMSprop": _rmsprop,
    "SGD": _sgd,
}

_KEYS: Mapping[str, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg", "grad_avg", "momentum_buffer"),
    "SGD": ("momentum_buffer",),
}
"""The names of an optimiser's vectors."""

_NEEDS = {"grad_avg": "centered", "momentum_buffer": "momentum"}
"""The setting without which there is no such vector."""
