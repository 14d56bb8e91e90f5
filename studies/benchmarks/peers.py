"""The suite's other libraries: each peer and whence in turns, on the same records, and how their scores agree."""

import contextlib
import io
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from studies.benchmarks.cells import Cell, Result, Setting
from studies.benchmarks.engines import make_plain_pass, score
from studies.benchmarks.libraries import (
    PEERS,
    Peer,
    batch_size,
    compute_target_gradient,
    is_installed,
    losses,
    make_dattri_llm_step,
    take,
)
from studies.benchmarks.policies import RL, make_subject
from studies.benchmarks.subjects import Question, Subject
from studies.benchmarks.timing import find_free_memory, is_too_long, measure_peak, spread, take_turns, time_once
from whence.core import first_line
from whence.engines import covered_layers, record_training_pass
from whence.llm.base import language_view

POLICIES: Mapping[str, int] = {**RL, "gpt-1M": 64, "gpt-1M-lora": 64, "gpt-10M": 64, "gpt-10M-lora": 64, "gpt-100M": 16}
"""Policies, and how many records of each are scored."""

BESIDE = "torch-vmap"
"""The peer that all language models are scored by, next to those for language models alone."""

FEW = 8
"""Before all records, a peer is timed on this part of them, and on half of that."""

STEP_ROWS = 16
"""Rows of a training pass that is scored in the step."""

COPIES = 4
"""How often a peer holds the gradients, in single precision, at most: 3 times was measured."""

SLOW = 8.0
"""Seconds of a first call, at least, that is not repeated."""


def list_cells() -> Iterator[Cell]:
    """Yield a cell for each policy and peer, and for each language model's training pass."""
    for policy, size in POLICIES.items():
        for name in list_peers(policy):
            yield Cell(f"peers/{policy}/{name}", "peers", partial(measure_peer, policy, name, size))
    for policy, size in POLICIES.items():
        if policy not in RL:
            yield Cell(f"steps/{policy}", "steps", partial(measure_step, policy))
            yield Cell(f"operations/{policy}", "operations", partial(count_operations, policy, size))


def list_peers(policy: str) -> list[str]:
    """Return the peers that are asked about a policy."""
    if policy in RL:
        return [name for name, peer in PEERS.items() if not peer.of_language]
    return [name for name, peer in PEERS.items() if peer.of_language or policy == "gpt-1M" or name == BESIDE]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide what libraries print and warn of."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def measure_peer(policy: str, name: str, size: int, setting: Setting) -> Result:
    """Return the seconds of a peer and of whence in turns, its memory, and how its scores agree."""
    peer = PEERS[name]
    if not is_installed(peer):
        return {"skipped": f"not installed: make peers ({peer.module})"}
    subject = make_subject(policy, setting.device)
    try:
        with silence():
            return {"note": peer.note, **compare(peer, subject, size, setting)}
    except Exception as failure:
        return {"records": size, "note": peer.note, "refused": describe_failure(failure)}


def describe_failure(failure: Exception) -> str:
    """Return an error's kind and first line; of an assertion without words, the asserted line."""
    text = first_line(failure) if str(failure) else str(traceback.extract_tb(failure.__traceback__)[-1].line)
    return f"{type(failure).__name__}: {text}"


def compare(peer: Peer, subject: Subject, size: int, setting: Setting) -> Result:
    """Return what `measure_peer` does of a peer that can express the question."""
    question = subject.question(size)
    question = replace(question, model=deepcopy(question.model))  # peers leave hooks and gradients behind
    seconds = predict_peer(peer, question, setting.device)
    needed = COPIES * 4 * subject.parameters * (size if peer.holds_all else min(size, batch_size(question)))
    reason = "time" if is_too_long(seconds) else "memory" if needed > find_free_memory(setting.device) else None
    if reason is not None:
        return {"records": size, "estimated": reason, "estimated_from": [size // FEW], "seconds": {"median": seconds}}
    whence_run, run = score(subject, subject.records(size), "ghost"), partial(peer.run, question)
    whence_run()  # its first call measures what a record costs; the peer's has imported
    turns = take_turns([run, whence_run], repeats=setting.repeats, device=setting.device)
    (scores, peak), (influence, whence_peak) = (run_for_peak(each, setting.device) for each in (run, whence_run))
    scores, truth = scores.detach().cpu().double(), influence[""].scores.double()
    return {
        "records": size,
        "seconds": spread([turn[0] for turn in turns]),
        "whence": spread([turn[1] for turn in turns]),
        "ratio": spread([turn[0] / turn[1] for turn in turns]),
        "difference": measure_difference(scores, truth),
        "spearman": float(spearmanr(scores, truth).statistic),
        "peak": peak,
        "whence_peak": whence_peak,
    }


def measure_step(policy: str, setting: Setting) -> Result:
    """Return the seconds and the memory of a training pass: plain, scored in the step, and by dattri-LLM's callback."""
    if not is_installed(PEERS["dattri-llm"]):
        return {"skipped": "not installed: make peers (dattri_llm)"}
    subject = make_subject(policy, setting.device)
    question = subject.question(STEP_ROWS)
    question = replace(question, model=deepcopy(question.model))
    with silence():
        runs = {
            "plain": partial(run_plain_step, question),
            "seconds": make_step(question),
            "dattri": make_dattri_llm_step(question),
        }
        turns = take_turns([*runs.values()], repeats=setting.repeats, device=setting.device)
        outcomes = {name: run_for_peak(run, setting.device) for name, run in runs.items()}
    truth, scores = (outcomes[name][0].detach().cpu().double() for name in ("seconds", "dattri"))
    by_name = dict(zip(runs, zip(*turns, strict=True), strict=True))
    return {
        "records": STEP_ROWS,
        **{name: spread(seconds) for name, seconds in by_name.items()},
        "ratios": {
            name: spread([one / plain for one, plain in zip(by_name[name], by_name["plain"], strict=True)])
            for name in ("seconds", "dattri")
        },
        "peaks": {name: peak for name, (_, peak) in outcomes.items()},
        "note": PEERS["dattri-llm"].note,
        "difference": measure_difference(scores, truth),
        "spearman": float(spearmanr(scores, truth).statistic),
    }


def count_operations(policy: str, size: int, setting: Setting) -> Result:
    """Return the floating-point operations of whence and of the peers, over those of a plain pass over the records."""
    make_subject.cache_clear()  # so that the first call is one
    subject = make_subject(policy, setting.device)
    question, records = subject.question(size), subject.records(size)
    peers = {name: PEERS[name] for name in (BESIDE, *PEERS) if name == BESIDE or PEERS[name].of_language}
    if missing := sorted({str(peer.module) for peer in peers.values() if not is_installed(peer)}):
        return {"skipped": f"not installed: make peers ({', '.join(missing)})"}
    scoring = score(subject, records, "ghost")
    runs = {"whence's first call": scoring, "whence": scoring}  # the first one also measures what a record costs
    runs |= {name: partial(peer.run, replace(question, model=deepcopy(question.model))) for name, peer in peers.items()}
    plain = _count(make_plain_pass(subject, records))
    return {"records": size, "passes": {name: _count(run) / plain for name, run in runs.items()}}


def _count(run: Callable[[], Any]) -> int:
    with silence(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def run_plain_step(question: Question) -> None:
    """Make a plain training pass over the records."""
    question.model.zero_grad(set_to_none=True)
    losses(question).sum().backward()


def make_step(question: Question) -> Callable[[], Tensor]:
    """Return a training pass over the records, whose scores by the target whence makes in it."""
    model: Any = question.model.model
    parameters: Any = language_view(model).parameters()
    layers = covered_layers(dict(model.named_modules()), parameters)
    gradient = {name.removeprefix("model."): each for name, each in compute_target_gradient(question).items()}

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        with record_training_pass(layers, parameters, len(question)) as step:
            loss = losses(question).sum()
        scores = step.backward(loss, gradient)
        assert scores is not None
        step.add_gradient(torch.ones(len(question)))
        return scores

    return run


def measure_difference(scores: Tensor, truth: Tensor) -> float:
    """Return the largest difference of two scores over the largest score."""
    return float((scores - truth).abs().max() / truth.abs().max())


def predict_peer(peer: Peer, question: Question, device: str) -> float:
    """Return the seconds of a peer on all records: a part that grows with them, and one that does not."""

    def time_some(size: int) -> float:
        return time_once(partial(peer.run, take(question, slice(0, size))), device)

    size = len(question)
    few, half = max(2, size // FEW), max(1, size // (2 * FEW))
    first = time_some(half)
    less = first if first > SLOW else time_some(half)  # a first call imports
    more = time_some(few)
    return more + max(0.0, more - less) / (few - half) * (size - few)


def run_for_peak(run: Any, device: str) -> tuple[Any, dict[str, int | None] | None]:
    """Return what a run gives, and the most memory that it takes; None where it cannot be counted."""
    results: list[Any] = []
    try:
        peak = measure_peak(lambda: results.append(run()), device)
    except RuntimeError:
        return run(), None
    return results[0], peak
