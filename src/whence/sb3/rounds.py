"""Recording what SB3's `train()` does in a round, and letting it do the same again."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import A2C
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import FloatSchedule
from torch import Tensor

from whence.errors import Unsupported, WhenceError
from whence.guards import kept_generators
from whence.policies import as_view
from whence.records import RecordBatch, Tree
from whence.rounds import OptimizerState, RoundRecording, Update
from whence.rounds.identity import check_collected, check_modes
from whence.rounds.optimizers import check_optimizer
from whence.sb3.contrib import MaskablePPO

log = logging.getLogger("whence")


class Recorder:
    """Takes note of a round while `train()` runs: `buffer.get` tells it of epochs and minibatches.

    Args:
        model: about to be trained.

    Raises:
        Unsupported: the optimiser has several groups of parameters.
    """

    def __init__(self, model: Any) -> None:
        check_groups(model)
        self._model = model
        self._start = _copies(tensors_of(model.policy))
        self._minibatches: list[Tensor] = []
        self._epochs: list[int] = []
        self._epoch, self._stepped = -1, 0
        self._advantages: Tensor | None = None

    def epoch(self) -> None:
        """Hear that a pass over the records begins."""
        if self._epoch < 0:
            # Not before train() is under way: it sets the learning rate, and the progress that schedules read.
            self._optimizer = _optimizer_state(self._model.policy)
            self._update = _update(self._model)
            self._generator = torch.get_rng_state()
        self._epoch += 1

    def minibatch(self, indices: NDArray[np.int64]) -> None:
        """Hear of the records of the next minibatch."""
        if self._advantages is None:  # as train() reads them: flattened by now, and normalised where that is done once
            self._advantages = torch.from_numpy(self._model.rollout_buffer.advantages.flatten())
        self._minibatches.append(torch.from_numpy(np.array(indices)))
        self._epochs.append(self._epoch)

    def stepped(self) -> None:
        """Hear that the last minibatch was stepped on."""
        self._stepped += 1

    def recording(self, number: int, records: RecordBatch) -> RoundRecording:
        """Return what was noted, once `train()` is over; the records have the advantages that it read."""
        return RoundRecording(
            number=number,
            records=records if self._advantages is None else records.with_advantages(self._advantages),
            start=self._start,
            end=_copies(tensors_of(self._model.policy)),
            optimizer=self._optimizer,
            minibatches=tuple(self._minibatches),
            epochs=tuple(self._epochs),
            stopped=self._stepped < len(self._minibatches),
            update=self._update,
            generator=self._generator,
            versions={"whence": version("whence"), **_versions(self._model)},
        )


def check_groups(model: Any) -> None:
    """Refuse a model whose optimiser has several groups of parameters.

    Raises:
        Unsupported: it has.
    """
    if (count := len(model.policy.optimizer.param_groups)) != 1:
        raise Unsupported(
            f"The optimiser has {count} groups of parameters; rounds of one group can be recorded, and recording is "
            "what guards and scores of whole rounds go by. Leave guard and recordings out and take score='snapshot' "
            "or 'crossfit', or train all parameters in one group."
        )


def check_steps(model: Any) -> None:
    """Refuse a model whose steps cannot be gone through by a score of whole rounds.

    Args:
        model: whose environments have been reset.

    Raises:
        Unsupported: its optimiser is not known or has a setting that is not, or its policy says something else in train
            mode than in eval mode; the message says which.
    """
    try:
        check_optimizer(_optimizer_state(model.policy))
    except Unsupported as refused:
        raise Unsupported(f"{refused} To train with this optimiser, take score='snapshot' or 'crossfit'.") from None
    view = as_view(model.policy)
    check_modes(view, view.parameters(), _standing(model))


def _standing(model: Any) -> RecordBatch:
    """Return a record, of some action, for every observation at which the environments stand."""
    nothing = torch.zeros(model.n_envs)
    actions = torch.zeros(model.n_envs, *model.action_space.shape)
    records = RecordBatch(observations=model._last_obs, actions=actions, log_probs=nothing, advantages=nothing)
    return records.to(model.policy.device)


def replay(model: Any, recording: RoundRecording) -> dict[str, Tensor]:
    """Let SB3's own `train()` do a recorded round again, and return parameters and buffers after it.

    On the CPU, with the recorded versions, the result is the recorded one bit for bit; the logger "whence" of Python's
    logging is warned of other versions of what computes it, with which it is up to rounding only. The model is as
    before afterwards: policy, optimiser, gradients, schedules, logger, buffer and counters, and every random generator.

    Args:
        model: the PPO, A2C or MaskablePPO that was trained, or one built like it.
        recording: of `InfluenceCallback(recordings=...)`.

    Raises:
        WhenceError: the recording is of another policy, optimiser or algorithm.
    """
    _check_same(model, recording)
    _warn_of_versions(model, recording)
    with untouched(model), kept_generators():
        _place(model, recording)
        view = as_view(model.policy)
        check_collected(view, view.parameters(), recording.records, recording.number)
        torch.set_rng_state(recording.generator)
        model.train()
        return _copies(tensors_of(model.policy))


def _versions(model: Any) -> dict[str, str]:
    """Return the versions of what computes a model's training."""
    contributed = ["sb3-contrib"] if isinstance(model, MaskablePPO) else []
    return {package: version(package) for package in ("torch", "stable-baselines3", *contributed)}


def _warn_of_versions(model: Any, recording: RoundRecording) -> None:
    differing = [
        (package, recorded, mine)
        for package, mine in _versions(model).items()
        if (recorded := recording.versions.get(package, "of unknown version")) != mine
    ]
    if differing:
        log.warning(
            "The recording of round %d was made with %s; here is %s. So its replay may differ from what was recorded "
            "by rounding, which training makes larger. Install the recorded versions for one that is the same bit for "
            "bit.",
            recording.number,
            " and ".join(f"{package} {recorded}" for package, recorded, _ in differing),
            " and ".join(f"{package} {mine}" for package, _, mine in differing),
        )


def tensors_of(policy: Any) -> dict[str, Tensor]:
    """Return a policy's parameters and buffers, each once.

    A shared features extractor stands under three names in `state_dict()`, which safetensors refuses.
    """
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _optimizer_state(policy: Any) -> OptimizerState:
    optimizer = policy.optimizer
    (group,) = optimizer.param_groups
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
    state = {
        names[id(parameter)]: {
            key: torch.as_tensor(value).detach().clone() for key, value in own.items() if value is not None
        }
        for parameter, own in optimizer.state.items()
    }
    return OptimizerState(type(optimizer).__name__, settings, state)


def _update(model: Any) -> Update:
    progress = model._current_progress_remaining
    ppo = not isinstance(model, A2C)
    clip_range_vf = model.clip_range_vf(progress) if ppo and model.clip_range_vf is not None else None
    return Update(
        algorithm="ppo" if ppo else "a2c",
        clip_range=float(model.clip_range(progress)) if ppo else 0.2,
        clip_range_vf=None if clip_range_vf is None else float(clip_range_vf),
        normalize_advantage=bool(model.normalize_advantage),
        ent_coef=float(model.ent_coef),
        vf_coef=float(model.vf_coef),
        max_grad_norm=float(model.max_grad_norm),
        target_kl=model.target_kl if ppo else None,
        n_epochs=model.n_epochs if ppo else 1,
        batch_size=model.batch_size if ppo else None,
    )


def _check_same(model: Any, recording: RoundRecording) -> None:
    here, policy = tensors_of(model.policy), type(model.policy.optimizer).__name__
    algorithm = "a2c" if isinstance(model, A2C) else "ppo"
    for what, mine, theirs in (
        ("algorithm", algorithm, recording.update.algorithm),
        ("optimiser", policy, recording.optimizer.name),
        ("set of tensors", sorted(here), sorted(recording.start)),
        (
            "shapes",
            {n: tuple(t.shape) for n, t in here.items()},
            {n: tuple(t.shape) for n, t in recording.start.items()},
        ),
    ):
        if mine != theirs:
            raise WhenceError(
                f"The recording is of another policy: its {what} is {theirs}, the model's {mine}. Build the model with "
                "the settings of the run that was recorded."
            )


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Leave a model as it is, whatever is trained meanwhile, in silence: policy, optimiser, gradients, attributes."""
    policy = model.policy
    attributes = dict(vars(model))
    tensors, training = _copies(tensors_of(policy)), {module: module.training for module in policy.modules()}
    gradients = [parameter.grad for parameter in policy.parameters()]
    give_back = _held(policy.optimizer)
    for parameter in policy.parameters():
        parameter.grad = None
    model.verbose = 0  # train() would say that it stopped early
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(attributes)
        load_tensors(tensors_of(policy), tensors)
        give_back()
        for module, own in training.items():
            module.training = own
        for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _held(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what makes an optimiser as it is now again, in the same objects, which others may hold."""
    groups = [
        (group, {key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]
    # What steps change in place beside a copy of it.
    state = [
        (p, own, {key: (value, copy.deepcopy(value)) for key, value in own.items()})
        for p, own in optimizer.state.items()
    ]

    def give_back() -> None:
        for group, settings in groups:
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        optimizer.state.clear()
        for parameter, own, values in state:
            own.clear()
            for key, (value, before) in values.items():
                own[key] = value.copy_(before) if isinstance(value, Tensor) else before
            optimizer.state[parameter] = own

    return give_back


def _place(model: Any, recording: RoundRecording) -> None:
    """Put a recording's beginning into a model."""
    update = recording.update
    load_tensors(tensors_of(model.policy), recording.start)
    optimizer = model.policy.optimizer
    (group,) = optimizer.param_groups
    group.update({key: tuple(v) if isinstance(v, list) else v for key, v in recording.optimizer.settings.items()})
    optimizer.state.clear()
    for name, parameter in model.policy.named_parameters():
        if name in recording.optimizer.state:
            own = recording.optimizer.state[name].items()
            # Counts of steps stay where the optimiser has them; loaded from a file all tensors are on the CPU.
            optimizer.state[parameter] = {k: t.to(t if k == "step" else parameter, copy=True) for k, t in own}
    model.lr_schedule = FloatSchedule(recording.optimizer.settings["lr"])
    if update.algorithm == "ppo":
        model.clip_range = FloatSchedule(update.clip_range)
        model.clip_range_vf = None if update.clip_range_vf is None else FloatSchedule(update.clip_range_vf)
        model.target_kl, model.n_epochs = update.target_kl, update.n_epochs
    model.normalize_advantage, model.max_grad_norm = update.normalize_advantage, update.max_grad_norm
    model.ent_coef, model.vf_coef = update.ent_coef, update.vf_coef
    model._logger = Logger(None, [])
    model.rollout_buffer = _buffer(model.rollout_buffer, recording)


def _buffer(like: Any, recording: RoundRecording) -> Any:
    """Return a buffer that holds the recorded rollout and yields the recorded minibatches."""
    buffer, records, n = copy.copy(like), recording.records, len(recording.records)
    buffer.generator_ready, buffer.full = True, True
    shape = like.obs_shape

    def flat(tree: Tree, shape: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: flat(branch, shape[key]) for key, branch in tree.items()}
        return tree.cpu().numpy().reshape(n, *shape)

    buffer.observations = flat(records.observations, shape)
    buffer.actions = flat(records.actions, (like.action_dim,))
    for name in ("values", "log_probs", "advantages", "returns"):
        setattr(buffer, name, flat(getattr(records, name), (1,)))
    if records.action_masks is not None:
        buffer.action_masks = flat(records.action_masks, (-1,))
    epochs = iter(range(recording.update.n_epochs))

    def get(batch_size: int | None = None) -> Iterator[Any]:
        epoch = next(epochs)
        for indices, own in zip(recording.minibatches, recording.epochs, strict=True):
            if own == epoch:
                yield buffer._get_samples(indices.numpy())

    buffer.get = get
    return buffer


def load_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of their names."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
