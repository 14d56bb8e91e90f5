"""Proofs of what taught an agent a decision: SB3's own trainings over rounds, without the records in question."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from torch import Tensor

from whence.causes.decision_causes import NEAREST, find_causes
from whence.causes.decisions import join_trees, read_log_probs
from whence.causes.proofs import FOLDER, Proof, check_left_out, list_trained, name_top, prove
from whence.core import Action, RecordBatch
from whence.rounds.recording import RoundRecording
from whence.runs import RunDirectory, check_links
from whence.sb3 import copy_tensors, load_tensors, named_tensors, replay_rounds
from whence.stored.agents import (
    AnyEnv,
    draw_minibatches,
    leave_out,
    load_policy,
    load_trainable_rounds,
    measure_returns,
)


def prove_decision(
    run: RunDirectory,
    target: Action | None = None,
    left_out: pl.DataFrame | None = None,
    *,
    behaviour: str = "what these records did",
    method: str = NEAREST,
    top: int = 64,
    rounds: Sequence[int] | None = None,
    seeds: int = 5,
    test_episodes: int = 50,
    env: AnyEnv = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Proof:
    """Train rounds again without the records that taught a decision, and compare with two controls.

    Each training begins with the policy of the first round and goes through all rounds by SB3's own `train()`, on the
    stored rollouts, with advantages as stored. In one seed all trainings share their minibatches, less what is left
    out. In the first seed these are the recorded ones where a round was recorded, so that training on all records of
    recorded rounds gives the run's own policy to the bit; else they are drawn by the seed.

    Args:
        run: the run of an agent.
        target: the decision, or several; None: what the left-out records did.
        left_out: the records to leave out, `round` and `record_id`; None: those that a finder names.
        behaviour: the decision in words.
        method: the finder, one of `find_causes`.
        top: how many records it names.
        rounds: consecutive rounds; None: all.
        seeds: the number of seeds, of minibatches, random records, placebos and tests.
        test_episodes: episodes by which each policy is tested; 0: none.
        env: see `load_round`.
        on_stage: called with the name of each training as it begins.

    Raises:
        RunDirectoryError: a round is not there, or the policy cannot be built again.
        ReplayError: the environment to test in cannot be made; see `measure_returns`.
        WhenceError: see `check_left_out` and `find_causes`.
    """
    check_links(run.path)
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    model, recordings, recorded = load_trainable_rounds(run, numbers, env=env)
    trained = list_trained({number: run.round("records", number) for number in numbers})

    def find(decision: Action) -> pl.DataFrame:
        pair = {"target_states": decision.observation, "actions": decision.action, "action_masks": decision.action_mask}
        return name_top(find_causes(run, **pair, rounds=numbers, method=method, env=env), trained, top)

    find_placebo = None
    if left_out is None:
        assert target is not None
        on_stage("finding the records")
        left_out, size = find(target), len(target.as_records(recordings[0].records))
        others = trained.join(left_out, on=["round", "record_id"], how="anti")

        def find_placebo(generator: np.random.Generator) -> pl.DataFrame:
            chosen = others[generator.choice(len(others), min(size, len(others)), replace=False)]
            return find(_read_pairs(recordings, chosen))

    left_out = check_left_out(trained, left_out)
    pairs = (target or _read_pairs(recordings, left_out)).as_records(recordings[0].records)
    name = "density" if isinstance(model.action_space, spaces.Box) else "probability"
    tests = measure_returns(run, model, numbers[-1], episodes=test_episodes, seed=0, env=env)
    with tests if test_episodes else nullcontext() as test:

        def measure_policy(tensors: Mapping[str, Tensor], seed: int) -> dict[str, float]:
            load_tensors(named_tensors(model.policy), tensors)
            outcomes = {name: float(read_log_probs(model, pairs).double().exp().mean())}
            return outcomes if test is None else outcomes | {"test return": test(tensors, seed)}

        def measure(group: pl.DataFrame, seed: int) -> dict[str, float]:
            return measure_policy(replay_rounds(model, _list_rounds(recordings, trained, group, seed)), seed)

        table, file = prove(
            trained,
            left_out,
            measure,
            find_placebo=find_placebo,
            seeds=seeds,
            folder=run.path / FOLDER,
            about={
                "behaviour": behaviour,
                "rounds": list(numbers),
                "target": repr(target),
                "method": None if find_placebo is None else method,
                "test_episodes": test_episodes,
            },
            on_stage=on_stage,
        )
        stored = {}
        if run.round_path("policies", numbers[-1] + 1).exists():
            load_policy(run, numbers[-1] + 1, model)
            stored = measure_policy(copy_tensors(named_tensors(model.policy)), 0)
    return Proof(behaviour, "records", len(left_out), table, stored, _list_notes(numbers, recorded), file)


def _list_rounds(
    recordings: Sequence[RoundRecording], trained: pl.DataFrame, group: pl.DataFrame, seed: int
) -> list[RoundRecording]:
    """Return the rounds with a seed's minibatches, without a group of records."""
    rounds = []
    for recording in recordings:
        ids, dropped = (
            table.filter(pl.col("round") == recording.number)["record_id"].to_list() for table in (trained, group)
        )
        if seed or not len(recording.minibatches):
            recording = draw_minibatches(recording, ids, seed)
        rounds.append(leave_out(recording, dropped))
    return rounds


def _read_pairs(recordings: Sequence[RoundRecording], keys: pl.DataFrame) -> Action:
    """Return what was done in some records as a target."""
    parts: list[RecordBatch] = []
    for recording in recordings:
        ids = keys.filter(pl.col("round") == recording.number)["record_id"].to_torch()
        if len(places := torch.isin(recording.records.ids, ids).nonzero()[:, 0]):
            parts.append(recording.records.take(places))
    masks = [part.action_masks for part in parts if part.action_masks is not None]
    return Action(
        join_trees([part.observations for part in parts]),
        torch.cat([part.actions for part in parts]),
        torch.cat(masks) if masks else None,
    )


def _list_notes(numbers: Sequence[int], recorded: Sequence[int]) -> list[str]:
    if len(recorded) == len(numbers):
        return ["The first seed has the recorded minibatches: with all records, it gives the run's own policy."]
    missing = [number for number in numbers if number not in recorded]
    note = f"{len(missing)} of {len(numbers)} rounds were not recorded, so their minibatches are drawn by the seed."
    if numbers[0] > 1 and numbers[0] in missing:
        note += " The optimiser begins anew."
    return [f"{note} To record them: --record-rounds {numbers[0]}-{numbers[-1]}."]
