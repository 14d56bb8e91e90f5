"""Other libraries asked for whence's scores: the product of each record's gradient with one target's.

A peer is a function from a `Question` to scores, (n,). It does all that a round needs, from a model and records in
memory to scores, and works in batches of 256 records, or 16 rows of a language model. Its scores are compared with
those of whence. Install what is missing: `make peers`.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from studies.benchmarks.subjects import Question


def batch_size(question: Question) -> int:
    """Return how many records a peer takes at a time."""
    return 256 if question.weights.ndim == 1 else 16


def split(question: Question) -> Iterator[Question]:
    """Yield the records in batches."""
    size = batch_size(question)
    for start in range(0, len(question), size):
        yield take(question, slice(start, start + size))


def take(question: Question, index: slice) -> Question:
    """Return the question of some of the records."""
    columns = {name: getattr(question, name)[index] for name in ("actions", "weights", "target_weights")}
    return replace(question, inputs=tuple(tensor[index] for tensor in question.inputs), **columns)


def sum_weighted(question: Question, outputs: Any, actions: Tensor, weights: Tensor) -> Tensor:
    """Return each record's sum of weighted log-probs, (n,)."""
    products = question.log_probs(outputs, actions) * weights
    return products if products.ndim == 1 else products.flatten(1).sum(1)


def losses(question: Question) -> Tensor:
    """Return each record's loss, (n,), with a graph."""
    return -sum_weighted(question, question.model(*question.inputs), question.actions, question.weights)


def compute_target(question: Question) -> Tensor:
    """Return the target, with a graph: the mean over records."""
    outputs = question.model(*question.inputs)
    return sum_weighted(question, outputs, question.actions, question.target_weights).mean()


def list_trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that train, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def compute_target_gradient(question: Question) -> dict[str, Tensor]:
    """Return the target's gradient by one backward pass."""
    parameters = list_trainable(question.model)
    derivatives = torch.autograd.grad(compute_target(question), list(parameters.values()))
    return dict(zip(parameters, derivatives, strict=True))


def contract(by_record: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> Tensor:
    """Return the products of gradients of losses, each (n, ...), with the target's: scores are of minus the loss."""
    return -torch.stack([by_record[name].flatten(1) @ gradient[name].flatten() for name in gradient]).sum(0)


def vmap_gradients(question: Question) -> dict[str, Tensor]:
    """Return each record's gradient by torch.func, each (n, ...)."""

    def loss(parameters: dict[str, Tensor], inputs: tuple[Tensor, ...], actions: Tensor, weights: Tensor) -> Tensor:
        outputs = functional_call(question.model, parameters, tuple(tensor[None] for tensor in inputs))
        return -sum_weighted(question, outputs, actions[None], weights[None]).sum()

    parameters = {name: parameter.detach() for name, parameter in list_trainable(question.model).items()}
    arguments = question.inputs, question.actions, question.weights
    return vmap(grad(loss), (None, 0, 0, 0))(parameters, *arguments)


def torch_vmap(question: Question) -> Tensor:
    """Contract each batch's gradients by torch.func with the target's, so that one batch's are held at a time."""
    gradient = compute_target_gradient(question)
    return torch.cat([contract(vmap_gradients(batch), gradient) for batch in split(question)])


def matrix_by_vmap(question: Question) -> Tensor:
    """Write the gradients by torch.func into one matrix, (n, p), and multiply it by the target's."""
    gradient = compute_target_gradient(question)
    rows = [torch.cat([g.flatten(1) for g in vmap_gradients(batch).values()], dim=1) for batch in split(question)]
    return -torch.cat(rows) @ torch.cat([g.flatten() for g in gradient.values()])


def matrix_by_loop(question: Question) -> Tensor:
    """Make a backward pass for each record, stack the gradients into a matrix, (n, p), and multiply it."""
    gradient, rows = compute_target_gradient(question), []
    for place in range(len(question)):
        question.model.zero_grad()
        losses(take(question, slice(place, place + 1))).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in list_trainable(question.model).values()]))
    return -torch.stack(rows) @ torch.cat([g.flatten() for g in gradient.values()])


def opacus(question: Question) -> Tensor:
    """Contract Opacus' per-sample gradients with the target's."""
    from opacus import GradSampleModule

    gradient, scores = compute_target_gradient(question), []
    model = GradSampleModule(deepcopy(question.model), loss_reduction="sum").train()  # only then it sees activations
    for batch in split(question):
        model.zero_grad(set_to_none=True)
        losses(replace(batch, model=model)).sum().backward()
        samples = {name: model.get_parameter(f"_module.{name}").grad_sample for name in gradient}
        for name, by_record in samples.items():
            if not isinstance(by_record, Tensor) or len(by_record) != len(batch):
                what = f"shape {tuple(by_record.shape)}" if isinstance(by_record, Tensor) else "none"
                raise RuntimeError(f"per-sample gradients of {name} for {len(batch)} records: {what}")
        scores.append(contract(samples, gradient))
    return torch.cat(scores)


def dattri(question: Question) -> Tensor:
    """Ask dattri's TracInAttributor for one checkpoint; the target is a test sample that holds all records."""
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.task import AttributionTask

    def objective(parameters: dict[str, Tensor], record: tuple[Tensor, ...]) -> Tensor:
        *inputs, actions, weights = (tensor[None] for tensor in record)
        outputs = functional_call(question.model, parameters, tuple(inputs))
        return sum_weighted(question, outputs, actions, weights).sum()

    def target(parameters: dict[str, Tensor], records: tuple[Tensor, ...]) -> Tensor:
        *inputs, actions, weights = records
        outputs = functional_call(question.model, parameters, tuple(inputs))
        return sum_weighted(question, outputs, actions, weights).mean()

    state = question.model.state_dict()
    task = AttributionTask(objective, question.model, state, target_func=target)
    device = question.weights.device.type
    attributor = TracInAttributor(task, weight_list=torch.ones(1), normalized_grad=False, device=device)
    attributor.projector_kwargs = None  # it has a random projection otherwise, even if None is passed
    records = TensorDataset(*question.inputs, question.actions, question.weights)
    whole = TensorDataset(*(t[None] for t in (*question.inputs, question.actions, question.target_weights)))
    return attributor.attribute(DataLoader(records, batch_size=batch_size(question)), DataLoader(whole)).flatten()


class _Loss:
    """A loss of captum's: it takes outputs and one tensor of labels, actions and weights together."""

    def __init__(self, question: Question, reduction: str) -> None:
        self.question, self.reduction = question, reduction

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        actions, weights = labels[..., :-1], labels[..., -1]
        if self.question.actions.ndim == self.question.weights.ndim:
            actions = actions.squeeze(-1).to(self.question.actions.dtype)
        each = -sum_weighted(self.question, outputs, actions, weights)
        return each.sum() if self.reduction == "sum" else each


def has_only_plain_layers(model: nn.Module) -> bool:
    """Return whether all that trains belongs to linear and convolutional layers, the ones that captum has rules for."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False)) == sum(
        p.numel() for p in model.parameters()
    )


def _label(question: Question, weights: Tensor) -> TensorDataset:
    actions = question.actions if question.actions.ndim > weights.ndim else question.actions.unsqueeze(-1)
    return TensorDataset(*question.inputs, torch.cat([actions.to(weights.dtype), weights.unsqueeze(-1)], dim=-1))


def captum(question: Question) -> Tensor:
    """Ask captum's TracInCP for one checkpoint: all records' gradients, times the sum of those of the target.

    It has a fast way, which leaves out other layers than linear and convolutional ones without a word, and a loop.
    """
    from captum.influence import TracInCP

    is_fast = has_only_plain_layers(question.model)

    tracin = TracInCP(
        deepcopy(question.model),
        _label(question, question.weights),
        checkpoints=["now"],
        checkpoints_load_func=lambda model, path: 1.0,
        loss_fn=_Loss(question, "sum" if is_fast else "none"),
        batch_size=batch_size(question),
        sample_wise_grads_per_batch=is_fast,
    )
    load = partial(DataLoader, batch_size=batch_size(question))
    target = tracin.compute_intermediate_quantities(load(_label(question, question.target_weights)), aggregate=True)
    records = tracin.compute_intermediate_quantities(load(_label(question, question.weights)))
    return (records @ target.flatten()) / len(question)


def kronfluence(question: Question) -> Tensor:
    """Ask kronfluence for pairwise scores with the sum of the target's gradients; it writes them to a directory."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Objective(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            *inputs, actions, weights, _ = batch
            return -sum_weighted(question, model(*inputs), actions, weights).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            *inputs, actions, _, weights = batch
            return -sum_weighted(question, model(*inputs), actions, weights).sum()

    records = TensorDataset(*question.inputs, question.actions, question.weights, question.target_weights)
    task, size = Objective(), batch_size(question)
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(deepcopy(question.model), task)
        on_cpu = question.weights.device.type == "cpu"
        analyzer = Analyzer("suite", model, task, cpu=on_cpu, output_dir=folder, disable_tqdm=True)
        factors = FactorArguments(strategy="identity", use_empirical_fisher=True)
        analyzer.fit_all_factors("factors", records, per_device_batch_size=size, factor_args=factors)
        analyzer.compute_pairwise_scores(
            *("scores", "factors", records, records),
            per_device_query_batch_size=size,
            per_device_train_batch_size=size,
            score_args=ScoreArguments(aggregate_query_gradients=True),
        )
        return analyzer.load_pairwise_scores("scores")["all_modules"].flatten() / len(question)


class Peer(NamedTuple):
    """A library, or a way to do it by hand: `run` returns scores, (n,); `module` is what it imports, None: torch alone.

    `note` says by what definition its scores differ from whence's, "" if they are the same; `holds_all`: whether it
    holds the gradients of all records at a time, not those of a batch.
    """

    run: Callable[[Question], Tensor]
    module: str | None = None
    note: str = ""
    holds_all: bool = False


PEERS: Mapping[str, Peer] = {
    "torch-vmap": Peer(torch_vmap),
    "matrix-vmap": Peer(matrix_by_vmap, holds_all=True),
    "matrix-loop": Peer(matrix_by_loop, holds_all=True),
    "opacus": Peer(opacus, "opacus"),
    "dattri": Peer(dattri, "dattri"),
    "captum": Peer(captum, "captum", holds_all=True),
    "kronfluence": Peer(kronfluence, "kronfluence", "linear and convolutional layers alone"),
}


def is_installed(peer: Peer) -> bool:
    """Return whether a peer can be imported."""
    return peer.module is None or importlib.util.find_spec(peer.module) is not None
