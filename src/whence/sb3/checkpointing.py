"""An agent's training that may be interrupted: its state, read for a checkpoint and restored from one by `learn()`."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from sb3_contrib import MaskablePPO
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, load_rng_state, named_tensors, read_rng_state
from whence.runs import Checkpoint, RunRecorder, load_states, read_states
from whence.sb3.episodes import (
    ResetTracker,
    accept_resets,
    digest_code,
    explain_inexact,
    is_plain,
    read_environments,
    restore_environments,
    restore_vec_wrappers,
)
from whence.sb3.models import describe_model, load_tensors, read_versions
from whence.sb3.rounds import Ongoing, begin_episodes
from whence.selection import SelectionRule

log = logging.getLogger("whence")

NAMES = "names.actions", "names.observations"
"""The settings that may differ when a training continues: they are only shown."""


def open_run(
    recorder: RunRecorder, model: Any, settings: Mapping[str, Any], tracker: ResetTracker | None, *, overwrite: bool
) -> tuple[Checkpoint | None, ResetTracker]:
    """Open a run directory as `learn()` begins; return the checkpoint to continue from, if any, and a tracker.

    The model's environments have been reset. `tracker` is what followed them in an earlier `learn()`; None: this is the
    first. See `RunDirectory.begin` and `check_continues` of what is refused.
    """
    # In a further learn(), the wrappers' attributes may have changed since they were described.
    may_change = (*NAMES, *(() if tracker is None else ("env_wrappers", "other_env_wrappers")))
    checkpoint = recorder.begin(
        {**describe_model(model), **settings},
        versions={**read_versions(), "device": str(model.device)},
        overwrite=overwrite,
        may_change=may_change,
        check=partial(check_continues, model, recorder.path),
    )
    recorder.note_first(code=digest_code(model.env))
    if checkpoint is None:
        rounds = math.ceil(model._total_timesteps / (model.n_steps * model.n_envs))
        recorder.plan_policies(sum(tensor.nbytes for tensor in named_tensors(model.policy).values()), rounds)
    if tracker is None or tracker.vec_env is not model.env:
        tracker = ResetTracker(model.env)
    with tracker.wrapped():
        reason = explain_inexact(model.env) if recorder.saves else None
    if reason is not None:
        log.warning(
            "If this training is interrupted, it can go on, but with new episodes, and not as if nothing had "
            "happened: %s.",
            reason,
        )
    return checkpoint, tracker


@dataclass
class CallbackState:
    """What a callback counts from round to round, of one model; a checkpoint holds it.

    Attributes:
        rounds: the rounds that were scored.
        learns: the calls of `learn()`.
        last_timestep: SB3's count of steps at the end of the last round.
        skipped_rounds: the rounds that kept too few records to train on.
        ongoing: the episodes between two rounds.
        logged: what was logged, and is not logged again.
    """

    rounds: int = 0
    learns: int = 0
    last_timestep: int = 0
    skipped_rounds: int = 0
    ongoing: Ongoing = field(default_factory=lambda: Ongoing.unknown(0))
    logged: set[str] = field(default_factory=set)

    def begin_learn(self, model: Any, tracker: ResetTracker | None) -> None:
        """Begin a `learn()`, which resets the environments or continues where it stopped, and so the episodes.

        They are new if steps were taken that no rollout of the callback holds, too, or if the environments are others.
        """
        self.learns += 1
        starts = model._last_episode_starts
        continues = len(self.ongoing.ids) == len(starts) and not starts.all()
        is_new = tracker is not None and not tracker.has_started
        if is_new or not continues or model.num_timesteps != self.last_timestep:
            self.begin_episodes(model)
            if tracker is not None:
                tracker.start(starts)

    def begin_episodes(self, model: Any) -> None:
        """Begin new episodes in all environments of a model."""
        # Where learn() has reset SB3's count of steps, ids of records continue.
        first_record = self.ongoing.first_record + max(0, self.last_timestep - model.num_timesteps)
        self.ongoing = Ongoing.unknown(model.n_envs, self.ongoing.next_id, first_record)

    def read(self, rule: SelectionRule) -> dict[str, Any]:
        """Return the state between two rounds, with the rule's, for a checkpoint."""
        return {
            **{name: getattr(self, name) for name in ("learns", "last_timestep", "skipped_rounds")},
            **{"ongoing": vars(self.ongoing), "advice": sorted(self.logged), "rule": read_states([rule])},
        }

    @classmethod
    def load(cls, model: Any, checkpoint: Checkpoint, rule: SelectionRule) -> Self:
        """Return the state after a checkpoint's round, and put the rule into its own."""
        state = checkpoint.content["callback"]
        load_states([rule], state["rule"])
        ongoing, logged = Ongoing(**state["ongoing"]), set(state["advice"])
        learns = count_learns(model, checkpoint)
        return cls(checkpoint.round, learns, state["last_timestep"], state["skipped_rounds"], ongoing, logged)


_COUNTERS = "num_timesteps", "_episode_num", "_n_updates", "_current_progress_remaining"
_OBSERVED = "_last_obs", "_last_original_obs", "_last_episode_starts"
_NOISE = "exploration_mat", "exploration_matrices"


def read_model(model: Any) -> dict[str, Any]:
    """Return the state of a model between `train()` and the next rollout, for a checkpoint.

    It holds parameters and buffers, the optimiser, gSDE's matrices, counters, the present observations, and the
    statistics of the last episodes, but no settings and no environments.
    """
    optimizer = model.policy.optimizer.state_dict()
    noise = {name: getattr(model.policy.action_dist, name, None) for name in _NOISE} if model.use_sde else {}
    return {
        "policy": named_tensors(model.policy),
        "optimizer": {
            "state": {str(index): dict(state) for index, state in optimizer["state"].items()},
            "groups": optimizer["param_groups"],
        },
        "noise": noise,
        "counters": {name: getattr(model, name) for name in _COUNTERS},
        "total_timesteps": model._total_timesteps,
        "observed": {name: getattr(model, name) for name in _OBSERVED},
        "lstm_states": getattr(model, "_last_lstm_states", None),
        # Texts stand for what a checkpoint does not hold.
        "episodes": [
            {str(name): value if is_plain(value) else str(value) for name, value in episode.items()}
            for episode in model.ep_info_buffer or ()
        ],
        "successes": [bool(success) for success in model.ep_success_buffer or ()],
        "generators": read_rng_state(),
    }


def read_training(model: Any, tracker: ResetTracker, callback: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a training between two rounds, for a checkpoint, with the callback's own."""
    return {"callback": callback, "model": read_model(model), "environments": read_environments(model.env, tracker)}


def restore_model(model: Any, content: Mapping[str, Any]) -> None:
    """Put a model, and the global generators, into the state that `read_model` returned."""
    load_tensors(named_tensors(model.policy), content["policy"])
    optimizer = model.policy.optimizer
    state = {int(index): dict(values) for index, values in content["optimizer"]["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": content["optimizer"]["groups"]})
    for name in filter(content["noise"].__contains__, _NOISE):  # a file of a stranger's may name any attribute
        matrix = content["noise"][name]
        setattr(model.policy.action_dist, name, matrix.to(model.device) if isinstance(matrix, Tensor) else matrix)
    for group, names in (("counters", _COUNTERS), ("observed", _OBSERVED)):
        for name in names:
            setattr(model, name, content[group][name])
    if (states := content.get("lstm_states")) is not None:
        model._last_lstm_states = RNNStates(*(tuple(each.to(model.device) for each in pair) for pair in states))
    model.ep_info_buffer = deque(content["episodes"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(content["successes"], maxlen=model._stats_window_size)
    load_rng_state(content["generators"])


def check_continues(model: Any, path: Path, checkpoint: Checkpoint | None) -> None:
    """Refuse, as `learn()` begins, a model that does not continue the run in a directory."""
    if checkpoint is None:
        return
    content = checkpoint.content["model"]
    done, total, steps = content["counters"]["num_timesteps"], model._total_timesteps, model.n_steps * model.n_envs
    is_same, learns = has_tensors(model, content["policy"]), checkpoint.content["callback"]["learns"]
    wrong = None
    if learns > 1 and not is_same:
        wrong = f"{learns} calls of learn(), and a script that starts over would go on in its first"
    elif model.num_timesteps and not (model.num_timesteps == done and is_same):
        wrong = f"{done:,} steps, and this model has learned otherwise, for {model.num_timesteps:,} steps"
    elif done >= total + steps:
        wrong = f"{done:,} steps, more than the {total:,} of this learn()"
    if wrong is not None:
        raise RunDirectoryError(
            f"{path} holds a run of {wrong}. Pass overwrite=True to replace the run, choose another directory, or go "
            "on with it: model, callback = whence.sb3.resume(run, env)."
        )
    if done >= total:
        log.warning(
            "%s holds this run, finished after %d rounds: nothing is trained. To train anew, pass overwrite=True or "
            "another directory.",
            *(path, checkpoint.round),
        )
    elif not model.num_timesteps:
        log.warning("%s: going on after round %d (%s of %s steps).", path, checkpoint.round, f"{done:,}", f"{total:,}")


def is_other(model: Any, scored: Any, rule: SelectionRule, recorder: RunRecorder | None) -> bool:
    """Return whether a model is neither the scored one nor a copy; refuse that if a run or a rule's state is of it."""
    if model is scored or has_tensors(model, named_tensors(scored.policy)):
        return False
    if recorder is not None or hasattr(rule, "load_state_dict"):
        where = "its rule has a state" if recorder is None else f"{recorder.path} is that model's run"
        raise WhenceError(
            f"This callback has scored another model, and {where}. Make a callback for each model, with a directory of "
            "its own: InfluenceCallback(..., run=...)."
        )
    return True


def count_learns(model: Any, checkpoint: Checkpoint) -> int:
    """Return the number of calls of `learn()` in a run, with the one that continues after a checkpoint."""
    state, trained = checkpoint.content["callback"], checkpoint.content["model"]
    has_ended = state["last_timestep"] >= trained["total_timesteps"]
    # A model continues after a learn() that had ended: another begins. Otherwise the interrupted one continues, or the
    # script of the one that had ended was changed to train longer.
    return int(state["learns"] + (has_ended and has_tensors(model, trained["policy"])))


def has_tensors(model: Any, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a model's policy is this one: it is the model that was trained, or was loaded or resumed."""
    present = named_tensors(model.policy)
    return present.keys() == tensors.keys() and all(
        tensor.cpu().equal(tensors[name].cpu()) for name, tensor in present.items()
    )


def restore_training(model: Any, tracker: ResetTracker, checkpoint: Checkpoint) -> str | None:
    """Put a model and its environments where they were; return why new episodes begin instead, None if they do not."""
    content, env = checkpoint.content, model.env
    with tracker.wrapped():
        reason = explain_inexact(env)
        if reason is None:
            reason = restore_environments(env, tracker, content["environments"], masked=isinstance(model, MaskablePPO))
        restore_model(model, content["model"])  # last, since environments may draw from global generators
        if reason is not None:
            restore_vec_wrappers(env, content["environments"])
            # Seeds that the training has not used.
            env.seed(int(np.random.SeedSequence([model.seed or 0, checkpoint.round]).generate_state(1)[0] % 2**31))
            accept_resets(env)
            begin_episodes(model)
            tracker.start(model._last_episode_starts)
    return reason
