"""Models made again: built from a run's configuration, and their tensors copied, loaded and restored.

No class is looked up by its name but known ones.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common import torch_layers
from stable_baselines3.common.sb2_compat import rmsprop_tf_like
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn, optim

from whence.core import RunDirectoryError, WhenceError, named_tensors, read_numbers, show, suggest
from whence.runs import RunDirectory
from whence.sb3.models.descriptions import HYPERPARAMETERS, is_schedule, make_space

SPACES = ("observation_space", "action_space")
"""The spaces in a run's configuration; None if they are none of SB3's."""

_NAME_CLASS = "Name the class: --policy module:Class (in Python: whence.sb3.register_policy_class). "
REMEDY = "Build the model and the callback as the script did; learn() goes on by itself."

_ALGORITHMS: Mapping[str, Any] = {"PPO": PPO, "A2C": A2C, "MaskablePPO": MaskablePPO, "RecurrentPPO": RecurrentPPO}

_POLICIES: Mapping[str, Any] = {
    policy.__name__: policy for algorithm in _ALGORITHMS.values() for policy in algorithm.policy_aliases.values()
}

_REGISTERED: dict[str, type] = {}


def register_policy_class(policy_class: type) -> None:
    """Let runs whose policy is, or has, a class of this name be built again, such as a features extractor's.

    Raises:
        WhenceError: it is no module's class.
    """
    if not (isinstance(policy_class, type) and issubclass(policy_class, nn.Module)):
        raise WhenceError(f"A policy, or a part of one, is a class of torch.nn.Module's, and {policy_class!r} is none.")
    _REGISTERED[policy_class.__name__] = policy_class


def build_model(
    run: RunDirectory,
    env: VecEnv | Any | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Any:
    """Return an untrained model like the one that a run trained, or refuse what is not known here.

    Args:
        run: the run.
        env: its environments; None: there are none, and the policy is built from the stored spaces.
        changes: hyper-parameters in place of stored ones, such as functions, which are not stored and have to be here.
            None: the model is to score, not to train, and gets neither schedules nor the optimiser.
        device: where it is trained.
    """
    config = run.config
    if config.get("policy", "") is None:
        raise RunDirectoryError(
            f"{run.path} was recorded around its environments alone, and holds no policy to score with, ask or train "
            "again. Findings, moments and groups work without."
        )
    policies = {**_POLICIES, **_REGISTERED}
    for what, classes in (("algorithm", _ALGORITHMS), ("policy", policies)):
        if (name := config.get(what)) not in classes:
            raise RunDirectoryError(
                f"{run.path} was trained with the {what} {name!r}, which cannot be built by its name; "
                f"{', '.join(classes)} can. {_NAME_CLASS if what == 'policy' else ''}{REMEDY}"
            )
    algorithm, policy = _ALGORITHMS[config["algorithm"]], policies[config["policy"]]
    parameters = inspect.signature(algorithm).parameters
    stored = read_numbers(config.get("hyperparameters", {}))
    functions = [name for name, value in stored.items() if is_schedule(value) and value["schedule"] != "linear"]
    if changes is not None and (missing := [name for name in functions if name not in changes]):
        raise RunDirectoryError(
            f"{run.path} was trained with {missing[0]} as {show(stored[missing[0]])}. Pass the schedule: "
            f"{missing[0]}=lambda remaining: ..."
        )
    policy_kwargs = config.get("policy_kwargs") or {}
    if changes is None:
        policy_kwargs = {name: value for name, value in policy_kwargs.items() if not name.startswith("optimizer_")}
    settings = {
        name: value
        for name, value in stored.items()
        if name in (*HYPERPARAMETERS, "seed") and name in parameters and name not in functions
    }
    if "use_rms_prop" in parameters:  # A2C's own optimiser, which is among the policy's arguments if it is used
        settings["use_rms_prop"] = "optimizer_class" in policy_kwargs
    if unknown := sorted(set(changes or {}) - set(parameters)):
        raise RunDirectoryError(
            f"{unknown[0]} is no hyper-parameter of {algorithm.__name__}. If it is an argument of InfluenceCallback, "
            "make the callback as the script did: model, _ = resume(run, env), then InfluenceCallback(rule, run=run, "
            "...)."
        )
    try:
        arguments = {name: _make_schedule(value) if is_schedule(value) else value for name, value in settings.items()}
        arguments |= {**(changes or {}), "policy_kwargs": resolve_classes(policy_kwargs)}
        with warnings.catch_warnings():
            # The model may have fewer environments than the one that was trained.
            warnings.filterwarnings("ignore", "You have specified a mini-batch size")
            model = algorithm(policy, env, device=device, _init_setup_model=env is not None, **arguments)
        if env is None:  # as SB3's own load() builds a model
            model.observation_space, model.action_space = map(make_space, (config[name] for name in SPACES))
            model.n_envs = 1
            model._setup_model()
        return model
    except Exception as refusal:  # SB3 and the policy's classes may raise anything
        kind = "" if isinstance(refusal, WhenceError) else f"{type(refusal).__name__}: "
        raise RunDirectoryError(
            f"The policy of {run.path} cannot be built from its configuration: {kind}{refusal} {REMEDY}"
        ) from refusal


def _make_schedule(stored: Mapping[str, Any]) -> LinearSchedule:
    return LinearSchedule(**{name: value for name, value in stored.items() if name != "schedule"})


class MiniGridCNN(torch_layers.BaseFeaturesExtractor):
    """LDA's MiniGrid network: 3x3 convolutions of 16 and 32 filters, then a linear layer of 64 (LDA §B.2; v2 §A.2)."""

    def __init__(self, observation_space: gym.spaces.Box) -> None:
        super().__init__(observation_space, features_dim=64)
        channels, height, width = observation_space.shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * (height - 4) * (width - 4), 64), nn.ReLU()),
        )

    def forward(self, observations: Tensor) -> Tensor:
        """Return (n, 64) features of (n, channels, height, width) images scaled to [0, 1]."""
        features: Tensor = self.layers(observations)
        return features


def resolve_classes(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's arguments, with classes in place of the names that configurations hold.

    A name is that of a class of PyTorch's, of Stable-Baselines3's or of this module's, alone or with its module's; or
    of one that was registered.

    Raises:
        WhenceError: no class of that name is known.
    """
    return {
        argument: _find_class(argument, value)
        if isinstance(value, str) and (argument.endswith("_class") or argument == "activation_fn")
        else value
        for argument, value in policy_kwargs.items()
    }


def _find_class(argument: str, path: str) -> type:
    name = path.rpartition(".")[2]
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = {**vars(nn), **vars(torch_layers), **vars(optim), **vars(rmsprop_tf_like), "MiniGridCNN": MiniGridCNN}
    candidate = known.get(name)
    if isinstance(candidate, type) and path in (name, f"{candidate.__module__}.{candidate.__qualname__}"):
        return candidate
    of = optim.Optimizer if argument == "optimizer_class" else nn.Module
    names = (name for name, each in known.items() if isinstance(each, type) and issubclass(each, of))
    raise WhenceError(
        f"{argument} is {path!r}, which is no class of PyTorch's or Stable-Baselines3's."
        f"{suggest(name, names, otherwise='')} {_NAME_CLASS.rstrip()}"
    )


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies of tensors, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def preserve_model(model: Any) -> Iterator[None]:
    """Restore a model on exit: policy, optimiser, gradients, attributes. It prints nothing meanwhile."""
    policy = model.policy
    attributes = dict(vars(model))
    tensors, modes = copy_tensors(named_tensors(policy)), {module: module.training for module in policy.modules()}
    gradients = [parameter.grad for parameter in policy.parameters()]
    groups = [(group, dict(group)) for group in policy.optimizer.param_groups]
    states = dict(policy.optimizer.state)
    # Steps change a state in place, so inside they are taken on copies.
    policy.optimizer.state.update({parameter: copy.deepcopy(state) for parameter, state in states.items()})
    for parameter in policy.parameters():
        parameter.grad = None
    model.verbose = 0  # train() would print that it stopped early
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(attributes)
        load_tensors(named_tensors(policy), tensors)
        for group, settings in groups:
            group.clear()
            group.update(settings)
        policy.optimizer.state.clear()
        policy.optimizer.state.update(states)
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
            parameter.grad = gradient


def load_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, in place, into those of the same names."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
