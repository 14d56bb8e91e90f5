"""The suite's first cells: each engine on each policy by the number of records, and beside training."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import whence
from studies.benchmarks.cells import Cell, Result, Setting
from studies.benchmarks.policies import LANGUAGE, WIDTHS, make_subject
from studies.benchmarks.subjects import Subject
from studies.benchmarks.timing import find_free_memory, is_too_long, measure_peak, predict, spread, take_turns
from whence.core import WhenceError, first_line
from whence.engines import measure_bytes
from whence.scores.attribution import score_targets

SIZES = (512, 2048, 16_384, 131_072, 1_000_000)
ROWS = (16, 64, 256)
"""Of a language model; each has 48 tokens."""

POLICIES = ("mlp", "minigrid", "nature")
ENGINES = ("ghost", "forward", "vmap", "loop")
LANGUAGE_ENGINES = ("ghost", "vmap", "loop")
CHUNK = 256
"""Records in a training step whose memory scoring is compared with."""

PEAK_LIMIT = 5.0
"""Seconds of a scoring, at most, that is done once more to count its memory; that of most records is in any case."""


def list_cells() -> Iterator[Cell]:
    """Yield the cells of scoring, the sizes of a row in order."""
    for name in POLICIES:
        for engine in ENGINES:
            yield from _list_row(name, engine, SIZES)
    for width in WIDTHS:
        for engine in ENGINES[:3]:
            yield from _list_row(f"width-{width}", engine, (2048,))
    for name in LANGUAGE:
        for engine in LANGUAGE_ENGINES:
            yield from _list_row(name, engine, ROWS)
    for name in POLICIES:
        for engine in ENGINES[:3]:
            yield Cell(f"training/{name}/{engine}", "training", partial(measure_training, name, engine))


def _list_row(name: str, engine: str, sizes: tuple[int, ...]) -> Iterator[Cell]:
    names = [f"{name}/{engine}/{size}" for size in sizes]
    for place, size in enumerate(sizes):
        measure = partial(measure_engine, name, engine, size)
        yield Cell(names[place], "engines", measure, tuple(names[:place]))


def score(subject: Subject, records: whence.RecordBatch, engine: str, **more: Any) -> Callable[[], Any]:
    """Return one scoring of the records within the policy's budget."""
    limits = {} if "chunk_size" in more else {"memory": subject.memory}
    settings = {**subject.scoring, "engine": engine, **limits, **more}
    target = settings.pop("target")
    targets = target if isinstance(target, dict) else {"": target}
    return lambda: score_targets(subject.policy, records, targets, **settings)


def make_plain_pass(subject: Subject, records: whence.RecordBatch) -> Callable[[], None]:
    """Return one forward and backward pass over all records, in pieces of `subject.chunk`."""
    pieces = [records.take(slice(start, start + subject.chunk)) for start in range(0, len(records), subject.chunk)]

    def run() -> None:
        subject.module.zero_grad()
        for piece in pieces:
            subject.plain(piece)

    return run


def measure_engine(name: str, engine: str, size: int, setting: Setting) -> Result:
    """Return the seconds of scoring and of a plain pass in turns, or their estimates; and the memory."""
    lines = [setting.results.get(f"{name}/{engine}/{fewer}") for fewer in (*SIZES, *ROWS) if fewer < size]
    lines = [line for line in lines if line is not None]
    refused = next((line["refused"] for line in lines if "refused" in line), None)
    if refused is not None:
        return {"records": size, "refused": refused}
    smaller = [line for line in lines if "estimated" not in line]
    if smaller and (estimated := estimate(smaller, size, setting.device)):
        return estimated
    subject = make_subject(name, setting.device)
    records = subject.records(size)
    runs = [score(subject, records, engine), make_plain_pass(subject, records)]
    try:
        turns = take_turns(runs, repeats=setting.repeats, device=setting.device)
    except (WhenceError, RuntimeError, NotImplementedError) as failure:
        return {"records": size, "refused": first_line(failure)}
    seconds, plain = ([turn[place] for turn in turns] for place in (0, 1))
    result = {
        "records": size,
        "parameters": subject.parameters,
        "budget": subject.memory,
        "record_bytes": sum(leaf.nbytes for leaf in tree_leaves(records.columns)) // size,
        "seconds": spread(seconds),
        "plain": spread(plain),
        "ratio": spread([one / other for one, other in zip(seconds, plain, strict=True)]),
    }
    if min(seconds) < PEAK_LIMIT or size == SIZES[-1]:
        result["peak"] = measure_peak(runs[0], setting.device)
    return result


def estimate(smaller: list[Result], size: int, device: str) -> Result | None:
    """Return what so many records would take, in proportion to what fewer took; None: they are scored."""
    sizes, last = [line["records"] for line in smaller], smaller[-1]
    seconds, plain = (predict(sizes, [line[name]["median"] for line in smaller], size) for name in ("seconds", "plain"))
    # The records, their copies on the way, and what scoring may hold.
    needed = 3 * last["record_bytes"] * size + last["budget"]
    if not is_too_long(seconds) and needed <= find_free_memory(device):
        return None
    return {
        "records": size,
        "parameters": last["parameters"],
        "estimated": "time" if is_too_long(seconds) else "memory",
        "estimated_from": sizes,
        "seconds": {"median": seconds},
        "plain": {"median": plain},
        "ratio": {"median": seconds / plain},
    }


def measure_training(name: str, engine: str, setting: Setting) -> Result:
    """Return scoring divided by SB3's `train()`, its memory by a training step's, and ten targets by one."""
    subject = make_subject(name, setting.device)
    assert subject.model is not None
    records = subject.records(subject.model.n_steps)
    run, repeats = score(subject, records, engine), {"repeats": setting.repeats, "device": setting.device}
    actions = {str(i): whence.Action(records.observations[i], records.actions[i]) for i in range(10)}
    tenfold = [score(subject, records, engine, target=target) for target in (actions, actions["0"])]
    targets = take_turns(tenfold, **repeats)
    chunk = records.take(slice(0, CHUNK))
    step, score_chunk = make_training_step(subject, chunk), score(subject, chunk, engine, chunk_size=CHUNK)
    step()  # the first one makes Adam's state, which stays
    score_chunk()
    memory = max(measure_bytes(score_chunk)) / max(measure_bytes(step))
    subject.model.learn(len(records))  # fills the model's own buffer, for train()
    turns = take_turns([run, subject.model.train], **{**repeats, "repeats": min(3, setting.repeats)})
    make_subject.cache_clear()  # its policy has been trained
    return {
        "records": len(records),
        "seconds": spread([turn[0] for turn in turns]),
        "optimisation": spread([turn[1] for turn in turns]),
        "share": spread([turn[0] / turn[1] for turn in turns]),
        "memory": memory,
        "ten_targets": spread([turn[0] / turn[1] for turn in targets]),
    }


def make_training_step(subject: Subject, records: whence.RecordBatch) -> Callable[[], None]:
    """Return one step of the optimisation on all the records at once: what SB3's `train()` does with a minibatch."""
    policy: Any = subject.policy

    def run() -> None:
        advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
        value, log_prob, entropy = policy.evaluate_actions(records.observations, records.actions)
        ratio = (log_prob - records.log_probs).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss = -surrogate + 0.5 * nn.functional.mse_loss(value.flatten(), records.returns) - 0.0 * entropy.mean()
        policy.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy.optimizer.step()

    return run
