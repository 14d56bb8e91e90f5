"""One training run, from its configuration to its directory."""

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from whence.core import RunDirectoryError, WhenceError, named_tensors
from whence.lab import efficiency
from whence.lab.agents.environments import digest_sources, make_evaluation_env, make_training_env
from whence.lab.agents.run_config import RunConfig
from whence.lab.arms import ARMS, counts_scoring, find_arm
from whence.runs import RunDirectory
from whence.sb3 import InfluenceCallback
from whence.sb3.episodes import Pool
from whence.sb3.models import (
    HYPERPARAMETERS,
    copy_tensors,
    describe_model,
    load_tensors,
    read_versions,
    resolve_classes,
)
from whence.stored.agents import measure_return

OnRound: TypeAlias = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of rounds done, from 0, and the last one's metrics."""

MakeCallback: TypeAlias = Callable[[RunConfig, RunDirectory | None, Collection[int]], InfluenceCallback]
"""Takes a run, its directory, and the rounds to record; returns the callback that trains it.

It is called once without a directory, for the callback's settings.
"""


def prepare(config: RunConfig) -> None:
    """Do nothing: a configuration is checked when it is made, and runs share nothing that has to be made first."""


def check(config: RunConfig) -> None:
    """Make a run's environments and model once, so that what SB3 refuses is known before a run is deleted."""
    with closing(make_training_env(config)) as env:
        make_model(config, env)


def run(
    config: RunConfig,
    path: str | Path,
    on_round: OnRound = lambda number, metrics: None,
    *,
    overwrite: bool = False,
    tensorboard: Path | None = None,
    recordings: Collection[int] = (),
    make_callback: MakeCallback | None = None,
) -> None:
    """Train and evaluate as `config` says, and write the run's directory.

    A finished run is left as it is. An interrupted one goes on where it was, to the same bits as if nothing had
    happened, and so does one that was planned with fewer rounds; with EnvPool it goes on with new episodes, and a note
    in config.json says so.

    Args:
        config: the run.
        path: the run's directory. Its config.json holds `config` under "experiment", besides what any run of
            `InfluenceCallback` says of its model.
        on_round: called with the number of rounds done and the last one's metrics.
        overwrite: delete the run that the directory holds, and start anew.
        tensorboard: directory for TensorBoard's files; None: none are written.
        recordings: rounds to record; see `InfluenceCallback`.
        make_callback: makes the callback of a study that selects or trains in a way of its own; `config.arm` is then
            but a name. None: the arm's rule selects.

    Raises:
        RunDirectoryError: the directory holds another run, or this one, finished without the recordings.
        WhenceError: PPO refuses the settings, the device is not there, or a round to record is not one of the run's.
    """
    path = Path(path)
    if make_callback is None:
        find_arm(config.arm)
        make_callback = _make_callback
    if beyond := [number for number in recordings if not 1 <= number <= config.rounds]:
        raise WhenceError(f"Round {beyond[0]} cannot be recorded: the run has rounds 1 to {config.rounds}.")
    if not overwrite and is_finished(config, path):
        stored = RunDirectory.open(path)
        if missing := [number for number in recordings if not stored.round_path("recordings", number).exists()]:
            raise RunDirectoryError(
                f"{path} holds this run, finished without a recording of round {missing[0]}. Choose another directory, "
                "or delete this one."
            )
        on_round(config.rounds, {})
        return
    torch.manual_seed(config.seed)
    env = make_training_env(config)
    test_env = make_evaluation_env(config, config.eval_episodes) if config.eval_episodes else None
    directory: RunDirectory | None = None
    try:
        model = make_model(config, env, tensorboard=tensorboard)
        settings = make_callback(config, None, recordings).settings()
        directory = RunDirectory.begin(
            path,
            {**describe_model(model), **settings, **_describe(config)},
            versions=read_versions(),
            overwrite=overwrite,
            may_change=["experiment.rounds"],  # is_finished has refused a run of more rounds
        )
        resumed = directory.checkpoint is not None
        directory.keep_rows("evaluations", config.evaluated_rounds)  # without a shorter run's last
        selection = make_callback(config, directory, recordings)
        evaluation = _Evaluation(config, test_env, directory, on_round, selection)
        model.learn(
            config.rounds * model.n_steps * config.n_envs,
            callback=[evaluation, selection],
            reset_num_timesteps=not resumed,  # TensorBoard's files go on, too
        )
        evaluation.evaluate()  # last of all, since a run with its last evaluation counts as finished
    finally:
        if directory is not None:
            directory.release()
        env.close()
        if isinstance(test_env, VecEnv):
            test_env.close()


def _describe(config: RunConfig) -> dict[str, Any]:
    return {"experiment": config.to_json(), "contents": digest_sources(config)}


def _make_callback(config: RunConfig, directory: RunDirectory | None, recordings: Collection[int]) -> InfluenceCallback:
    target = None if config.target == "return" else config.make_target()  # some rules bring their own
    return InfluenceCallback(config.rule(), target=target, engine=config.engine, run=directory, recordings=recordings)


def make_model(config: RunConfig, env: VecEnv, *, tensorboard: Path | None = None) -> PPO:
    """Return the untrained model of a run; a `WhenceError` gives SB3's reason if it refuses the settings."""
    check_device(config.device)
    policy_kwargs = {"optimizer_class": getattr(torch.optim, config.optimizer), **resolve_classes(config.policy_kwargs)}
    hyperparameters = dict(config.hyperparameters)
    if config.arm in ARMS and (scale := ARMS[config.arm].learning_rate_scale) != 1:
        rate = hyperparameters.get("learning_rate", HYPERPARAMETERS["learning_rate"])
        hyperparameters["learning_rate"] = scale * rate
    try:
        with warnings.catch_warnings():
            # The last minibatch of a round is shorter than the others where sizes do not divide; nothing is amiss.
            warnings.filterwarnings("ignore", "You have specified a mini-batch size")
            return PPO(
                config.policy,
                env,
                seed=config.seed,
                device=config.device,
                policy_kwargs=policy_kwargs,
                tensorboard_log=None if tensorboard is None else str(tensorboard),
                **hyperparameters,
            )
    except Exception as refused:
        reason = str(refused) or type(refused).__name__
        raise WhenceError(f"Stable-Baselines3's PPO refuses these settings: {reason}") from refused


def check_device(name: str) -> None:
    """Refuse a GPU that is not there, in whose place SB3 would train on the CPU without a word."""
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= (count := torch.cuda.device_count()):
        raise WhenceError(
            f"device is {name!r}, but torch {torch.__version__} finds {count} GPUs, numbered from 0. Train on one of "
            "them, or on the CPU: --device cpu."
        )


def is_finished(config: RunConfig, path: Path) -> bool:
    """Return whether a directory holds this very run, with its last round and evaluation; refuse another run."""
    if not (path / "config.json").exists():
        return False
    directory = RunDirectory.open(path)
    # No setting of a run depends on the number of rounds: its learning rate and clip range are constants.
    rounds = directory.experiment.get("rounds")
    may_change = ["experiment.rounds"] if isinstance(rounds, int) and rounds < config.rounds else []
    directory.check_same({**directory.config, **_describe(config)}, but=may_change)
    directory.check_signed()
    if not directory.round_path("policies", config.rounds + 1).exists():  # written last
        return False
    if not config.eval_episodes:
        return directory.table("timings").height == config.rounds
    return directory.table("evaluations").height == len(config.evaluated_rounds)


def make_curve(config: RunConfig, evaluations: pl.DataFrame, timings: pl.DataFrame) -> efficiency.Curve:
    """Return a run's learning curve and its seconds (process CPU) a round.

    Between evaluations the curve stays at the last one, and reaches nothing.
    """
    seconds = timings["collection_cpu"] + timings["optimisation_cpu"]
    if counts_scoring(config.arm):
        seconds = seconds + timings["scoring_cpu"]
    return efficiency.make_curve(config.rounds, evaluations, seconds.to_numpy())


def read_curve(config: RunConfig, path: Path) -> efficiency.Curve:
    """Read a finished run's learning curve; see `make_curve`."""
    if not is_finished(config, path):
        raise RunDirectoryError(f"{path} holds an unfinished run; run it again to finish it.")
    directory = RunDirectory.open(path)
    return make_curve(config, directory.table("evaluations"), efficiency.read_timings(directory, config.rounds))


class _Evaluation(BaseCallback):
    """Evaluate before each round, on environments of its own, and report the round before."""

    def __init__(
        self,
        config: RunConfig,
        env: VecEnv | Pool | None,
        directory: RunDirectory,
        on_round: OnRound,
        selection: InfluenceCallback,
    ) -> None:
        super().__init__()
        self._config, self._env, self._directory, self._on_round = config, env, directory, on_round
        self._selection = selection
        self._rounds_done = 0 if directory.checkpoint is None else directory.checkpoint.round

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.evaluate()

    def _init_callback(self) -> None:
        """Measure what another training left out, as one that `resume` went on with: its policies are stored."""
        stored, before = self._directory.table("evaluations"), copy_tensors(named_tensors(self.model.policy))
        done = [] if stored.is_empty() else stored["round"].to_list()
        for number in self._config.evaluated_rounds:
            if number not in done and number < self._rounds_done:
                load_tensors(named_tensors(self.model.policy), self._directory.policy(number + 1))
                self._measure(number)
        load_tensors(named_tensors(self.model.policy), before)

    def evaluate(self) -> None:
        """Evaluate the policy as it is, and write the figures."""
        metrics = dict(self._selection.metrics[-1]) if self._selection.metrics else {}
        if self._rounds_done in self._config.evaluated_rounds:
            metrics |= {"test_return": self._measure(self._rounds_done)}
        self._on_round(self._rounds_done, metrics)
        self._rounds_done += 1

    def _measure(self, number: int) -> float:
        """Evaluate the model's policy as that after a round, write the figures, and return the mean."""
        seed = int(np.random.SeedSequence([self._config.seed, number]).generate_state(1)[0])
        episodes = self._config.eval_episodes
        assert self._env is not None
        mean, error = measure_return(self.model, self._env, episodes=episodes, seed=seed)
        row = {"round": number, "test_return": mean, "standard_error": error, "episodes": episodes}
        self._directory.append("evaluations", row)
        return mean
