"""Does it happen again: a training continued from one of its rounds with other seeds, unchanged and changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from whence.causes.conditions import select_where
from whence.causes.retraining import train_variants
from whence.core import NonFinite, RecordBatch, WhenceError, named_tensors, preserve_rng_state, show
from whence.findings import LEAST_DEPTH, Drop, find_drop, read_returns
from whence.runs import RunDirectory, checkpoint_path, digest_content, list_checkpoints, load_tree
from whence.sb3 import Choice, InfluenceCallback
from whence.sb3.checkpointing import restore_model
from whence.sb3.episodes import digest_environment, digest_function
from whence.sb3.models import build_model
from whence.sb3.resuming import build_rule
from whence.sb3.rounds import begin_episodes
from whence.selection import KeepAll, ScoreAll, Selection
from whence.statistics import share_difference, share_interval, t_interval
from whence.stored.agents import AnyEnv, load_policy, make_replay_env, make_training_envs, require_training, state_names

FOLDER = "again"
"""The folder of a run that holds what was measured: a file for each question."""

PLAIN, WITHOUT, RANDOM = "unchanged", "without these records", "without random records"
"""Variants: nothing is changed; some records of each round are left out; as many others at random."""

BROKE, RETURN, LEFT_OUT = "broke", "return", "left out"
"""Outcomes: whether the return fell or the training diverged, 0 or 1; its mean in the last three rounds; and how many
records were left out.
"""

_EARLIER = 2
"""Rounds from where a repetition begins to the round from which the return was lower, at least."""


@dataclass(frozen=True, eq=False)
class Repetition:
    """What came of the trainings.

    Attributes:
        start: the round after which they continue.
        rounds: how many rounds each has.
        drop: how the run itself broke after that round; None: it did not.
        table: a row for each seed, variant and outcome: `seed`, `variant`, `outcome`, `value`; null: it is not known.
        notes: what a reader has to know of how it was done.
        file: where the numbers are.
    """

    start: int
    rounds: int
    drop: Drop | None
    table: pl.DataFrame
    notes: tuple[str, ...]
    file: Path

    @cached_property
    def counts(self) -> dict[str, tuple[int, int]]:
        """By variant, how many trainings broke, and of how many that is known."""
        rows = self.table.filter(pl.col("outcome") == BROKE)
        groups = rows.group_by("variant", maintain_order=True).agg(pl.col("value").sum(), of=pl.col("value").count())
        return {variant: (int(broke), int(count)) for variant, broke, count in groups.iter_rows()}

    def summarise(self) -> list[dict[str, Any]]:
        """Return a row for each variant: `broke`, `of`, the ends of the share's interval, of its change, the return."""
        rows = []
        for variant, (broke, of) in self.counts.items():
            plain = self.counts[PLAIN]
            low, high = share_interval(broke, of) if of else (None, None)
            has_change = variant != PLAIN and of and plain[1]
            change = share_difference((broke, of), plain) if has_change else (None, None)
            returns = self.table.filter((pl.col("variant") == variant) & (pl.col("outcome") == RETURN))["value"]
            rows.append(
                {
                    **{"variant": variant, "broke": broke, "of": of, "low": low, "high": high},
                    **{"change_low": change[0], "change_high": change[1]},
                    "return": t_interval(returns.drop_nulls().to_list()),
                }
            )
        return rows

    @property
    def text(self) -> str:
        """Whether it happens again, and what prevents it."""
        broke, of = self.counts[PLAIN]
        if not all(of for _, of in self.counts.values()):
            return "No episode ended in some trainings: name more rounds, or the environment with its time limit."
        low, high = share_interval(broke, of)
        verdict = "whether most do is open; more seeds would tell"
        if low > 0.5:
            verdict = "the next seed would most likely break, too"
        elif high < 0.5:
            verdict = "most seeds do not" + (", so what broke this run was chance" if self.drop is not None else "")
        count = f"{self.rounds} round{'s' * (self.rounds > 1)}"
        sentences = [f"After round {self.start}, {broke} of {of} other seeds break within {count}: {verdict}."]
        for row in self.summarise()[1:]:
            change = "no difference is seen"
            if row["change_high"] < 0:
                change = "fewer than unchanged"
            elif row["change_low"] > 0:
                change = "more than unchanged"
            variant = row["variant"]
            sentences.append(f"{variant[0].upper()}{variant[1:]}, {row['broke']} of {row['of']} break: {change}.")
        return " ".join(sentences)


def repeat(
    run: RunDirectory,
    start: int | None = None,
    *,
    seeds: int = 8,
    rounds: int | None = None,
    changes: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
    without: str | None = None,
    env: AnyEnv = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    **hyperparameters: Any,
) -> Repetition:
    """Continue a training from one of its rounds with other seeds, and count how often its return falls.

    Each seed has a training that is unchanged, one for each change, and of records to be left out, one without them
    and one without as many others at random in each round. Other seeds mean other episodes, actions and minibatches.
    They begin with the policy, the optimiser and VecNormalize's statistics after the round, in new episodes. What was
    measured is kept, and the same question asked again continues after the last training.

    Args:
        run: the run of an agent of SB3's that whence can train again.
        start: the round after which they continue; None: a checkpoint before the return fell.
        seeds: the number of seeds.
        rounds: the rounds of each training; None: as many as the run had from there on.
        changes: hyper-parameters, each of which is changed in a variant of its own.
        without: a condition in SQL on the records that one variant leaves out of each round.
        env: the environment; see `make_replay_env`.
        on_stage: called with the name of each training as it begins.
        hyperparameters: schedules that are functions, which are not stored.

    Raises:
        RunDirectoryError: the model or the round's policy is not there.
        ReplayError: the environment cannot be made.
        WhenceError: the return did not fall and no round is named; or a change or condition is not known.
    """
    require_training(run)
    if (stored := run.config.get("rule")) is None:
        raise WhenceError(f"{run.path} was recorded around its environments alone: no training can be continued.")
    if not isinstance(build_rule(stored), KeepAll | ScoreAll):
        raise WhenceError(
            f"{run.path} was trained on a selection, {show(stored)}, whose state is not continued here. Ask of a run "
            "that trained on all records."
        )
    numbers, returns = read_returns(run)
    drop = find_drop(numbers, returns)
    drop = drop if drop is not None and drop.depth >= LEAST_DEPTH else None
    start = choose_start(run, drop) if start is None else start
    last = max(run.rounds(), default=0)
    if not 1 <= start <= last:
        raise WhenceError(f"The round to continue after is {start}; give one from 1 to {last}.")
    count = max(1, last - start) if rounds is None else rounds
    saved = checkpoint_path(run.path, start) if start in list_checkpoints(run.path) else None
    begin = _Beginning(run, start, count, env, saved)
    known = returns[numbers <= start]
    trainings = dict[str, Callable[[int], dict[str, float]]]()

    def add(
        variant: str, change: Mapping[str, Any], leave_out: Callable[[int], "_WithoutRecords"] | None = None
    ) -> None:
        def train(seed: int) -> dict[str, float]:
            callback = None if leave_out is None else leave_out(seed)
            later = _continue(begin, seed, {**hyperparameters, **change}, callback)
            outcomes = {BROKE: 1.0, RETURN: math.nan} if later is None else _compare(known, later, drop)
            return outcomes | ({} if callback is None else {LEFT_OUT: callback.count})

        trainings[variant] = train

    add(PLAIN, {})
    for name, value in changes.items() if isinstance(changes, Mapping) else changes:
        add(f"with {name} = {value}", {name: value})
    if without is not None:
        names = state_names(run.config.get("env"), run.config)
        add(WITHOUT, {}, lambda seed: _WithoutRecords(without, names, None))
        add(RANDOM, {}, lambda seed: _WithoutRecords(without, names, seed))
    origin = saved or run.round_path("policies", start + 1)
    functions = {name: digest_function(each) if callable(each) else each for name, each in hyperparameters.items()}
    question = {
        "start": start,
        "rounds": count,
        "without": without,
        "hyperparameters": functions,
        "from": digest_content(origin),
        "env": digest_environment(make_replay_env(run, env), whole=True),
    }
    table, file = train_variants(trainings, seeds, run.path / FOLDER, question, question, on_stage)
    notes = [] if saved else [f"There is no checkpoint after round {start}: the optimiser begins anew."]
    left_out = table.filter(pl.col("variant").is_in([WITHOUT]) & (pl.col("outcome") == LEFT_OUT))["value"]
    if without is not None:
        notes.append(f"{float(left_out.mean() or 0):,.0f} records were left out in a training.")  # type: ignore[arg-type]
    fell_later = drop if drop is not None and drop.round > start else None
    return Repetition(start, count, fell_later, table, tuple(notes), file)


def _compare(known: NDArray[np.float64], later: NDArray[np.float64], drop: Drop | None) -> dict[str, float]:
    """Return whether the last returns are below the best by a third of what had been gained, and their mean."""
    part = max(1, min(3, len(later)))
    earlier = known[np.isfinite(known)]
    last = float(np.nanmean(later[-part:])) if np.isfinite(later[-part:]).any() else math.nan
    if not len(earlier) or math.isnan(last):
        return {BROKE: math.nan, RETURN: last}
    first = float(earlier[:3].mean()) if drop is None else drop.first
    best = float(np.lib.stride_tricks.sliding_window_view(earlier, min(3, len(earlier))).mean(axis=1).max())
    best = best if drop is None else drop.best
    return {BROKE: float(last < best - LEAST_DEPTH * (best - first)), RETURN: last}


def choose_start(run: RunDirectory, drop: Drop | None) -> int:
    """Return the last checkpoint before the return fell; without one, the round so long before."""
    if drop is None:
        raise WhenceError(
            f"The return of {run.path} did not fall, so nothing says where to begin. Name the round: --from 20."
        )
    before = [number for number in list_checkpoints(run.path) if number <= drop.round - _EARLIER]
    return before[-1] if before else max(1, drop.round - _EARLIER)


class _WithoutRecords(InfluenceCallback):
    """Leaves out the records for which a condition holds, or with a seed as many at random; `count` says how many."""

    def __init__(self, where: str, names: list[str] | None, seed: int | None) -> None:
        super().__init__()
        self.where, self.axes, self.count = where, names, 0
        self.generator = None if seed is None else np.random.default_rng([seed, 1])

    def choose(self, records: RecordBatch) -> Choice:
        """Keep the others."""
        table = self._steps.add_columns(records.to_polars(observations=True))  # rewards as environments gave them
        mask = select_where(table, self.where, self.axes, "--without").to_numpy()
        if 2 * mask.sum() > len(mask):
            raise WhenceError(
                f"--without {self.where!r} holds for {mask.sum()} of {len(mask)} records of a round, and as many "
                "others are needed to compare with. Name fewer."
            )
        if self.generator is not None:
            others = self.generator.choice(np.flatnonzero(~mask), int(mask.sum()), replace=False)
            mask = np.isin(np.arange(len(mask)), others)
        self.count += int(mask.sum())
        return Choice(None, Selection.dropping(torch.from_numpy(~mask), "left out"))


class _Returns(BaseCallback):
    """Notes the mean return of the episodes that end in each round, in the environment's rewards, and stops."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds, self.means, self.ended = rounds, list[float](), list[float]()

    def _on_training_start(self) -> None:
        self.sums = np.zeros(self.training_env.num_envs)

    def _on_rollout_start(self) -> None:
        self.ended = []

    def _on_step(self) -> bool:
        normaliser = unwrap_vec_normalize(self.training_env)
        self.sums += self.locals["rewards"] if normaliser is None else normaliser.get_original_reward()
        ended = np.flatnonzero(self.locals["dones"])
        self.ended += self.sums[ended].tolist()
        self.sums[ended] = 0.0
        return len(self.means) < self.rounds

    def _on_rollout_end(self) -> None:
        self.means.append(float(np.mean(self.ended)) if self.ended else np.nan)


@dataclass(frozen=True)
class _Beginning:
    """Where trainings begin: after round `start` of a run, for some rounds; `saved` is the checkpoint there."""

    run: RunDirectory
    start: int
    rounds: int
    env: AnyEnv
    saved: Path | None


def _continue(
    begin: _Beginning, seed: int, changes: Mapping[str, Any], callback: BaseCallback | None
) -> NDArray[np.float64] | None:
    """Return the mean return of each round of a training that continues with another seed; None: it diverged."""
    run, start = begin.run, begin.start
    with preserve_rng_state():
        vec_env = make_training_envs(run, begin.env, start)
        try:
            model = build_model(run, vec_env, changes=changes)
            if begin.saved is not None:
                content = load_tree(begin.saved)["model"]
                restore_model(model, content)
                total = content["total_timesteps"]
            else:
                load_policy(run, start + 1, model)
                steps = run.table("metrics").sort("round")
                model.num_timesteps = int(steps.filter(pl.col("round") <= start)["timestep"][-1])
                total = int(steps["timestep"][-1])
            # Seeds that the training has not used.
            model.set_random_seed(int(np.random.SeedSequence([seed, start]).generate_state(1)[0] % 2**31))
            begin_episodes(model)
            noted = _Returns(begin.rounds)
            left = max(total - model.num_timesteps, begin.rounds * model.n_steps * model.n_envs)
            try:
                model.learn(left, [noted, *([] if callback is None else [callback])], reset_num_timesteps=False)
            except (ValueError, NonFinite):  # SB3's distributions refuse parameters that are not finite
                if all(bool(torch.isfinite(each).all()) for each in named_tensors(model.policy).values()):
                    raise
                return None
        finally:
            vec_env.close()
    return np.array(noted.means)
