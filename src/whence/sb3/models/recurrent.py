"""Recurrent policies of sb3-contrib: the steps before each record, and LSTMs that read them from their beginning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from jaxtyping import Bool, Float, Int
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor
from torch.nn import functional as F

from whence.core import InvalidRecords, RecordBatch, Tree, map_tree, named_leaves

STATES = "hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf"
"""The states of the actor's and the critic's LSTM, by the names of sb3-contrib's buffer."""


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """A rollout's n steps as sequences: each begins with an episode, or in the state before the rollout.

    Attributes:
        observations: (n, ...) environment by environment, in order of time.
        record_ids: (n,) the steps' ids as records.
        episode_starts: (n,) whether a step begins an episode, in a state of zeros.
        env_index: (n,) the steps' environments.
        first: (n,) the position of the first step of each step's sequence.
        states: by the names in `STATES`, (environments, layers, units) before the rollout.
        number: identifies the history, in all processes.
    """

    observations: Tree
    record_ids: Int[Tensor, " n"]
    episode_starts: Bool[Tensor, " n"]
    env_index: Int[Tensor, " n"]
    first: Int[Tensor, " n"]
    states: Mapping[str, Float[Tensor, "envs layers units"]]
    number: int = field(default_factory=lambda: uuid4().int >> 66)


_HISTORIES: WeakValueDictionary[int, History] = WeakValueDictionary()
"""Histories by number, as long as records hold them: a policy's inputs are tensors, and name theirs by its number."""


def is_recurrent(policy: object) -> bool:
    """Return whether a policy is one of sb3-contrib's recurrent ones."""
    return isinstance(policy, RecurrentActorCriticPolicy)


def zero_states(policy: Any, count: int) -> RNNStates:
    """Return the states with which a recurrent policy begins `count` episodes."""
    layers, _, units = policy.lstm_hidden_state_shape
    h, c, h_critic, c_critic = torch.zeros(4, layers, count, units, device=policy.device)
    return RNNStates((h, c), (h_critic, c_critic))


def repeat_states(states: Mapping[str, Tensor], env_index: int, count: int) -> RNNStates:
    """Return one environment's states, of those that `History` has, as the policy's `count` times."""
    h, c, h_critic, c_critic = (states[name][env_index][:, None].repeat(1, count, 1) for name in STATES)
    return RNNStates((h, c), (h_critic, c_critic))


def add_history(records: RecordBatch, states: Mapping[str, Tensor]) -> RecordBatch:
    """Return the records of a whole rollout, environment by environment, with the history that they make up."""
    assert records.episode_starts is not None
    assert records.env_index is not None
    starts = records.episode_starts.clone()
    starts[1:] |= records.env_index.diff() != 0
    first = torch.where(starts, torch.arange(len(records)), 0).cummax(0).values
    columns = records.observations, records.ids, records.episode_starts, records.env_index
    return records.with_columns({"history": History(*columns, first, states)})


def prepare_sequences(records: RecordBatch) -> dict[str, Tensor]:
    """Return a recurrent policy's inputs in place of observations; refuse records that are in no history."""
    history, ids = records.history, records.ids.cpu()
    if history is None:
        raise InvalidRecords(
            "A recurrent policy reads the steps before a record, and these records have no history. Take them from "
            "whence.sb3.collect(model) or whence.sb3.snapshot(model), or of a stored run from "
            "whence.stored.load_round(run, round). An observation alone has none: ask about a record (whence why "
            "RUN --record N), or about an episode (--episode-seed N)."
        )
    ordered, order = history.record_ids.cpu().sort()
    positions = order[torch.searchsorted(ordered, ids).clamp(max=len(order) - 1)]
    is_there = history.record_ids.cpu()[positions] == ids
    for (_, part), (_, whole) in zip(
        named_leaves(records.observations), named_leaves(history.observations), strict=True
    ):
        is_there &= (part.cpu() == whole.cpu()[positions]).reshape(len(ids), -1).all(1)
    if not is_there.all():
        raise InvalidRecords(
            f"Record {int(ids[~is_there][0])} is not in the history of its batch, or not with this observation; its "
            f"records go from {int(ordered[0])} to {int(ordered[-1])}. Take parts of one rollout: records.take()."
        )
    _HISTORIES[history.number] = history
    return {"positions": positions, "history": torch.full_like(ids, history.number)}


def run_sequences(policy: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the actor's latent features for records, and a function that returns their values, (m,).

    The LSTMs read each record's sequence from its beginning up to the record.
    """
    history, like = _HISTORIES[int(inputs["history"][0])], next(policy.lstm_actor.parameters())
    rows, sizes, firsts, places = _pack_sequences(history.first, inputs["positions"].cpu())
    observations = map_tree(lambda tensor: tensor[rows].to(like.device), history.observations)
    observations = preprocess_obs(observations, policy.observation_space, policy.normalize_images)
    observations = map_tree(lambda tensor: tensor.to(like.dtype), observations)
    is_shared = policy.share_features_extractor
    features = (policy.features_extractor if is_shared else policy.pi_features_extractor)(observations)
    begins = history.episode_starts[firsts]

    def run(lstm: Any, features: Tensor, names: Sequence[str]) -> Tensor:
        states = torch.zeros(len(names), lstm.num_layers, len(begins), lstm.hidden_size)
        if not begins.all():
            before = torch.stack([history.states[name] for name in names])[:, history.env_index[firsts]]
            states = before.transpose(1, 2).masked_fill(begins[:, None], 0)
        return _run_lstm(lstm, features, sizes, *states.to(like))[places]

    latent = run(policy.lstm_actor, features, STATES[:2])

    def compute_values() -> Tensor:
        vf_features = features if is_shared else policy.vf_features_extractor(observations)
        if policy.lstm_critic is not None:
            of_critic = run(policy.lstm_critic, vf_features, STATES[2:])
        else:
            of_critic = latent.detach() if policy.shared_lstm else policy.critic(vf_features[places])
        values: Tensor = policy.value_net(policy.mlp_extractor.forward_critic(of_critic))
        return values.flatten()

    return policy.mlp_extractor.forward_actor(latent), compute_values


def _pack_sequences(
    first: Int[Tensor, " n"], positions: Int[Tensor, " m"]
) -> tuple[Int[Tensor, " k"], list[int], Int[Tensor, " sequences"], Int[Tensor, " m"]]:
    """Pack the sequences of some records, each up to the last of them: step by step, the longest sequence first.

    Returns:
        Positions of the first steps of all sequences, then of the second steps of all that have one, and so on; the
        number of sequences at each step; the positions of their first steps; and the records' places among the rows.
    """
    firsts, sequence = first[positions].unique(return_inverse=True)
    lengths = torch.zeros_like(firsts).scatter_reduce(0, sequence, positions - firsts[sequence] + 1, "amax")
    lengths, order = lengths.sort(descending=True, stable=True)
    firsts = firsts[order]
    steps = torch.arange(int(lengths[0]))[:, None]
    rows = (firsts + steps)[steps < lengths]
    places = torch.empty_like(first)
    places[rows] = torch.arange(len(rows))
    return rows, (steps < lengths).sum(1).tolist(), firsts, places[positions]


def _run_lstm(lstm: Any, features: Tensor, sizes: list[int], hidden: Tensor, cell: Tensor) -> Tensor:
    """Return an LSTM's outputs for packed sequences, from states (layers, sequences, units).

    It is computed step by step, since torch's fused kernels have no forward-mode derivative.
    """
    for names, h, c in zip(lstm._all_weights, hidden, cell, strict=True):
        weight_ih, weight_hh, bias_ih, bias_hh = [*(getattr(lstm, name) for name in names), None, None][:4]
        outputs = []
        for gates in F.linear(features, weight_ih, bias_ih).split(sizes):
            i, f, g, o = (gates + F.linear(h[: len(gates)], weight_hh, bias_hh)).chunk(4, dim=1)
            c = f.sigmoid() * c[: len(gates)] + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        features = torch.cat(outputs)
    return features
