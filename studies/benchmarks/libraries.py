"""Other libraries asked for whence's scores: the product of each record's gradient with one target's.

A peer is a function from a `Question` to scores, (n,). It does all that a round needs, from a model and records in
memory to scores, and works in batches: 256 records, or of a language model 16 rows, 4 of a large one. Its scores are
compared with those of whence. Install what is missing: `make peers`.
"""

import importlib.util
import math
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

LARGE = 50_000_000
"""Parameters from which on 16 rows' gradients are too many to hold."""


def batch_size(question: Question) -> int:
    """Return how many records a peer takes at a time."""
    if question.weights.ndim == 1:
        return 256
    return 16 if sum(p.numel() for p in list_trainable(question.model).values()) < LARGE else 4


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


def dattri_llm(question: Question) -> Tensor:
    """Ask dattri-LLM's TracInAttributor for the products of all records with all; the target is the records' mean."""
    from dattri_llm import REGISTER_ALL, AttributionArguments, AttributionTask, HookManagerConfig, TracInAttributor

    def loss(model: nn.Module, batch: Any) -> Tensor:
        *inputs, actions, weights = batch
        columns = {"inputs": tuple(inputs), "actions": actions, "weights": weights}
        return losses(replace(question, model=model, **columns)).sum()

    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), batch_size(question))
    weights = question.weights, question.target_weights
    records, target = (TensorDataset(*question.inputs, question.actions, each) for each in weights)
    with tempfile.TemporaryDirectory() as folder:
        attributor = TracInAttributor(AttributionArguments(folder, **sizes), task=AttributionTask(loss, question.model))
        layers = HookManagerConfig(linear_io=REGISTER_ALL)
        _, products = attributor.attribute(records, target, hook_config=layers).agnostic_matrix()
    return products.mean(1)


def capture(hooks: Any, question: Question) -> Any:
    """Return what dattri-LLM's hooks capture of the records' losses."""
    question.model.zero_grad(set_to_none=True)
    losses(question).sum().backward()
    return hooks.get_gradient()


def capture_target(hooks: Any, question: Question) -> Any:
    """Return the target's gradient, captured by dattri-LLM's hooks, as that of one record."""
    from dattri_llm import Factorized, Gradient
    from dattri_llm.gradient import materialize

    whole: dict[str, Tensor] = {}
    for batch in split(question):
        captured = capture(hooks, replace(batch, weights=batch.target_weights))
        for name, layer in captured.data.items():
            # The tokens of all rows, as if they were of one, so that no row's own gradient is formed.
            factors = (factor.flatten(0, 1)[None] for factor in (layer.activation, layer.pre_activation_grad))
            part = materialize(Factorized(*factors, layer.module_kwargs), captured.layer_types[name])
            whole[name] = whole.get(name, 0) + part / len(question)
    return Gradient(dict.fromkeys(whole, "materialized"), whole, captured.layer_types)


def dattri_llm_hooks(question: Question) -> Tensor:
    """Score as dattri-LLM's online selection does: hooks capture a pass, and multiply it by one target's gradient."""
    from dattri_llm import REGISTER_ALL, DataSelectionCallback, HookManager, HookManagerConfig

    scores, hooks = [], HookManager(question.model, HookManagerConfig(linear_io=REGISTER_ALL))
    with hooks.collect(deregister_on_exit=True):
        target = capture_target(hooks, question)
        for batch in split(question):
            by_layer = DataSelectionCallback.compute_scores(capture(hooks, batch), target)
            scores.append(torch.stack([*by_layer.values()]).sum(0))
    return torch.cat(scores)


def make_dattri_llm_step(question: Question) -> Callable[[], Tensor]:
    """Return a training pass over the records, whose scores by the target dattri-LLM's online selection makes in it."""
    from dattri_llm import REGISTER_ALL, DataSelectionCallback, HookManager, HookManagerConfig

    question = replace(question, model=deepcopy(question.model))
    hooks = HookManager(question.model, HookManagerConfig(linear_io=REGISTER_ALL))
    with hooks.collect():
        target = capture_target(hooks, question)
    settings: Any = {"target": "fixed", "target_gradient": target, "selection_kwargs": {"threshold": -math.inf}}
    selection = DataSelectionCallback(question.model, **settings)
    hooks.add_callback(selection)

    def run() -> Tensor:
        with hooks.collect():
            capture(hooks, question)
        assert selection.last_scores is not None
        return selection.last_scores

    return run


def bergson(question: Question) -> Tensor:
    """Ask Bergson for a query gradient, the mean over rows, and for the rows' scores by it, all in memory.

    It takes token ids, and one advantage of each row. As in its own pipeline, only input embeddings require a gradient.
    """
    from bergson import CollectorComputer, GradientProcessor, IndexConfig, InMemoryCollector, PreprocessConfig, Scorer
    from bergson.score.score_writer import InMemorySequenceScoreWriter
    from bergson.utils.peft import detect_peft_modules
    from datasets import Dataset

    model: Any = deepcopy(question.model).model
    has_adapters, (ids,), size = hasattr(model, "peft_config"), question.inputs, batch_size(question)
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    layers = {"model": model.base_model, "target_modules": detect_peft_modules(model)} if has_adapters else {}
    labels = torch.full_like(ids, -100)  # which it leaves out of the loss
    labels[:, -question.actions.shape[1] :] = question.actions
    places = range(len(question))
    batches = [[*places[start : start + size]] for start in places[::size]]

    def collect(weights: Tensor, **settings: Any) -> Any:
        columns = {"input_ids": ids, "labels": labels, "advantage": weights[:, 0]}
        rows = Dataset.from_dict({name: column.tolist() for name, column in columns.items()})
        processor = GradientProcessor(include_bias=True)
        collector = InMemoryCollector(
            **{"model": model, **layers, "data": rows, "cfg": config, "processor": processor, **settings}
        )
        CollectorComputer(model, rows, collector=collector, batches=batches, cfg=config).run_with_collector_hooks()
        return collector

    with tempfile.TemporaryDirectory() as folder:
        config = IndexConfig(run_path=f"{folder}/run", include_bias=True)
        config.partial_run_path.mkdir()
        query = collect(question.target_weights, preprocess_cfg=PreprocessConfig(aggregation="mean")).gradients
        writer = InMemorySequenceScoreWriter(len(question), 1)
        collect(question.weights, scorer=Scorer(query, [*query], writer, ids.device, torch.float32))
    return writer.scores[:, 0]


class Peer(NamedTuple):
    """A library, or a way to do it by hand: `run` returns scores, (n,); `module` is what it imports, None: torch alone.

    `note` says by what definition its scores differ from whence's, "" if they are the same; `holds_all`: whether it
    holds the gradients of all records at a time, not those of a batch; `of_language`: whether it is asked about
    language models alone.
    """

    run: Callable[[Question], Tensor]
    module: str | None = None
    note: str = ""
    holds_all: bool = False
    of_language: bool = False


TIED = "without the products of a tied weight's two uses"

PEERS: Mapping[str, Peer] = {
    "torch-vmap": Peer(torch_vmap),
    "matrix-vmap": Peer(matrix_by_vmap, holds_all=True),
    "matrix-loop": Peer(matrix_by_loop, holds_all=True),
    "opacus": Peer(opacus, "opacus"),
    "dattri": Peer(dattri, "dattri"),
    "captum": Peer(captum, "captum", holds_all=True),
    "kronfluence": Peer(kronfluence, "kronfluence", "linear and convolutional layers alone"),
    "dattri-llm": Peer(dattri_llm, "dattri_llm", TIED, of_language=True),
    "dattri-llm-hooks": Peer(dattri_llm_hooks, "dattri_llm", TIED, of_language=True),
    "bergson": Peer(bergson, "bergson", "linear layers alone", of_language=True),
}


def is_installed(peer: Peer) -> bool:
    """Return whether a peer can be imported."""
    return peer.module is None or importlib.util.find_spec(peer.module) is not None
