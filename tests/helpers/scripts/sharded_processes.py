"""The script that test_sharded.py runs in several processes, which hold a model in shards (FSDP2)."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from helpers.languages import language_model, rows_for, tokens
from helpers.launching import end_process
from whence import NonPositive, WhenceError, attribute
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, ValidationLoss, language_view, score_tokens
from whence.llm.base import Processes
from whence.llm.scores import Scoring, score
from whence.llm.scores.row_scores import split_work
from whence.scores.attribution import score_targets

ROWS = 7  # no multiple of the processes
AT_ONCE = {2: 3, 4: 1}
"""Rows of a pass by the number of processes: one process has fewer passes than the others."""

CASES = {2: [("gpt2", None), ("llama", 0.1), ("qwen3", None)], 4: [("gpt2", 0.1)]}
"""Models, and the dropout of an adapter, by the number of processes."""


class Squared(TokenReturn):
    """A target whose derivatives in the outputs depend on them."""

    linear = False

    def _terms(self, outputs: Any, rows: Any) -> torch.Tensor:
        return super()._terms(outputs, rows).square()


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_shards(model: Any) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.grad is None, name


def square_logits(net: Any, rows: Any) -> torch.Tensor:
    return net(input_ids=rows.observations["input_ids"], use_cache=False).logits.square().mean()


def differentiate(model: Any, rows: Any) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a training's loss."""
    square_logits(model, rows).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def make_case(
    style: str, lora: float | None, shard: Callable[[Any], Any] = shard
) -> tuple[Any, Any, Any, dict[str, Any]]:
    torch.manual_seed(0)
    whole = language_model(style, lora=lora).eval()
    rows = rows_for(whole, tokens(ROWS))
    targets = {
        "sequence": SequenceReturn(),
        "squared": Squared(),
        "demonstrations": ValidationLoss(**tokens(5), batch_size=2),
        "held out": SequenceReturn(rows_for(whole, tokens(3)), batch_size=1),
        "function": lambda view, params, records: view(params, view.prepare(records)).log_prob.square().mean(),
    }
    return whole, shard(copy.deepcopy(whole)), rows, targets


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def compare_scores(
    processes: Processes,
    cases: list[tuple[str, float | None]],
    shard: Callable[[Any], Any] = shard,
    check_shards: Callable[[Any], None] = check_shards,
    differentiate: Callable[[Any, Any], dict[str, torch.Tensor]] = differentiate,
) -> dict[str, Any]:
    """Return how far scores, and the gradients of a training after them, are from those of the whole model."""
    results: dict[str, Any] = {}
    for style, lora in cases:
        whole, model, rows, targets = make_case(style, lora, shard)
        for name, target in targets.items():
            scoring = Scoring(target, TokenPPO(), 1.0, "auto", None, AT_ONCE[processes.number], processes)
            influence = score(model, rows, scoring)
            exact = attribute(language_view(whole), rows, target=target, objective=TokenPPO(), engine="loop").scores
            keep = NonPositive().select(rows, influence).keep
            results[f"{style} {lora} {name}"] = {
                "apart": apart(influence.scores, exact),
                "same selection": keep.tolist() == (exact > 0).tolist(),
            }
        check_shards(model)
        # Training goes on as if nothing had been scored.
        gradients = differentiate(model, rows)
        square_logits(whole, rows).backward()
        results[f"{style} {lora} training"] = {
            "apart": max(
                apart(gradients[name], p.grad)
                for name, p in whole.named_parameters()
                if p.grad is not None and float(p.grad.abs().max()) > 1e-6
            ),
            "same selection": True,
        }
    return results


def constant(view: Any, params: Any, records: Any) -> torch.Tensor:
    return view(params, view.prepare(records)).log_prob.sum() * 0.0


def find_refusals(processes: Processes) -> dict[str, str]:
    _, model, rows, _ = make_case("llama", None)
    view, refusals = language_view(model), {}
    scoring = Scoring(SequenceReturn(), TokenPPO(), 1.0, "auto", None, 2, processes)
    local_rows, target, summed = split_work(rows, scoring.target, processes)
    settings = {"targets": {"": target}, "objective": TokenPPO()}
    attempts = {
        "no sum": lambda: score_targets(view, local_rows, **settings, chunk_size=2),
        "engine": lambda: score_targets(view, local_rows, **settings, summed=summed, engine="forward", chunk_size=2),
        "memory": lambda: score_targets(view, local_rows, **settings, summed=summed),
        "tokens": lambda: score_tokens(model, rows, target=SequenceReturn()),
        "constant": lambda: score_targets(
            view, local_rows, **settings | {"targets": {"": constant}}, summed=summed, chunk_size=2
        ),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except WhenceError as error:
            refusals[name] = str(error)
    return refusals


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    processes = Processes(accelerator)
    results = compare_scores(processes, CASES[processes.number])
    refusals = find_refusals(processes)
    (folder / f"{processes.rank}.json").write_text(json.dumps({"scores": results, "refusals": refusals}))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
