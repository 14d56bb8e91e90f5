"""What one has without findings, as lines with a strength: pivots, a boosted residual, SB3's log, and `check_env`.

Of each, lines count from the strength on that as few healthy runs reach as a table says; so their rules need no bound.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import polars as pl
from gymnasium.utils.env_checker import check_env as check_gymnasium_env
from numpy.typing import NDArray
from stable_baselines3.common.env_checker import check_env as check_sb3_env

from whence.runs import RunDirectory

MOST_ENTRIES = 64
"""Entries of an observation that are looked at: those that vary most."""

FEW = 6
"""Values of an entry up to which each is a group; of more, thirds are."""

FOLDS = 3

Numbers = NDArray[np.float64]


class Line(NamedTuple):
    """What is said of a run: how strongly, of what kind, and what. Of kind "place" it says where and not what."""

    strength: float
    kind: str
    text: str


@dataclass(frozen=True)
class Records:
    """All n records of a run, each copy's in the order of time.

    Attributes:
        columns: reward, advantage, env_index, step, round and episode_id, (n,) each.
        actions: (n, k), one column of a discrete action.
        observations: (n, d), those entries that vary most; `entries`: their numbers, (d,).
    """

    columns: Mapping[str, Numbers]
    actions: Numbers
    observations: Numbers
    entries: NDArray[np.int64]

    @property
    def next_observations(self) -> Numbers:
        """The next observation, (n, d); NaN where the next record is of another episode."""
        episode, copy = self.columns["episode_id"], self.columns["env_index"]
        joins = np.append((episode[1:] == episode[:-1]) & (copy[1:] == copy[:-1]), False)
        return np.where(joins[:, None], np.roll(self.observations, -1, axis=0), np.nan)


def read_records(run: RunDirectory) -> Records:
    """Return the records of a run."""
    tables = [run.round("records", number).with_columns(round=pl.lit(number)) for number in run.rounds()]
    table = pl.concat(tables, how="diagonal_relaxed").sort("env_index", "round", "record_id")
    names = ("reward", "advantage", "env_index", "step", "round", "episode_id")
    parts = [name for name in table.columns if name == "observation" or name.startswith("observation.")]
    observations = np.hstack([_read_matrix(table, name) for name in sorted(parts)])
    entries = np.sort(np.argsort(-observations.std(axis=0), kind="stable")[:MOST_ENTRIES])
    columns = {name: table[name].cast(pl.Float64).to_numpy() for name in names}
    return Records(columns, _read_matrix(table, "action"), observations[:, entries], entries)


def _read_matrix(table: pl.DataFrame, name: str) -> Numbers:
    return np.asarray(table[name].to_numpy(), dtype=np.float64).reshape(len(table), -1)


def _group(values: Numbers) -> NDArray[np.int64]:
    """Return the number of each value's group: of few values each is one, else thirds are."""
    levels, groups = np.unique(values, return_inverse=True)
    return groups if len(levels) <= FEW else np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values)


def rank_cells(values: Numbers, records: Records, name: str) -> list[Line]:
    """Return the cells of an action and another column in which the mean of values differs most, for its error."""
    first, half = records.columns["step"] == 0, records.columns["round"] > records.columns["round"].max() / 2
    axes = {"copy": records.columns["env_index"], "first step": first, "second half": half}
    axes |= {f"entry {entry}": column for entry, column in zip(records.entries, records.observations.T, strict=True)}
    is_discrete = records.actions.shape[1] == 1 and (records.actions % 1 == 0).all()
    actions = (
        np.unique(records.actions, return_inverse=True)[1].ravel() if is_discrete else _group(records.actions[:, 0])
    )
    centred, deviation, lines = values - values.mean(), values.std(), []
    for axis, column in axes.items():
        groups = _group(column)
        cells = actions * (groups.max() + 1) + groups
        counts = np.bincount(cells)
        means = np.bincount(cells, centred) / np.maximum(counts, 1)
        errors = np.abs(means) * np.sqrt(counts) / max(deviation, 1e-12)
        cell = int(errors.argmax())
        action, group = divmod(cell, int(groups.max()) + 1)
        lines.append(
            Line(float(errors[cell]), "place", f"{name} of action {action}, {axis} = {group}: {means[cell]:.3g}")
        )
    return sorted(lines, reverse=True)


def pivot(records: Records) -> list[Line]:
    """Return the cells of rewards and of advantages that differ most."""
    return sorted(
        [line for name in ("reward", "advantage") for line in rank_cells(records.columns[name], records, name)],
        reverse=True,
    )


def boost(records: Records) -> list[Line]:
    """Return the cells of what boosted trees, which saw other episodes, miss of the rewards."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    rewards = records.columns["reward"]
    known = np.hstack([records.observations, records.actions, records.next_observations])
    episodes = np.unique(records.columns["episode_id"], return_inverse=True)[1]
    if episodes.max() < FOLDS:  # an episode of the whole run is cut into stretches
        episodes = np.arange(len(rewards)) // 256
    folds = np.random.default_rng(0).permutation(episodes.max() + 1)[episodes] % FOLDS
    residuals = np.zeros(len(rewards))
    for fold in range(FOLDS):
        model = HistGradientBoostingRegressor(max_iter=60, learning_rate=0.2, early_stopping=False, random_state=0)
        model.fit(known[folds != fold], rewards[folds != fold])
        residuals[folds == fold] = rewards[folds == fold] - model.predict(known[folds == fold])
    return rank_cells(residuals, records, "missed reward")


def read_log(metrics: pl.DataFrame) -> list[Line]:
    """Return what SB3's log says of the second half of a training: how many times it is beyond the usual bounds."""
    names = ("approx_kl", "clip_fraction", "entropy_loss", "explained_variance", "std")
    known = {name: metrics[f"train/{name}"].drop_nulls() for name in names if f"train/{name}" in metrics.columns}
    late = {name: float(column.tail((len(column) + 1) // 2).median()) for name, column in known.items() if len(column)}  # type: ignore[arg-type]
    first = float(known["entropy_loss"][0]) if len(known.get("entropy_loss", ())) else 0.0
    divergence = max(late.get("approx_kl", 0.01), 1e-12)
    rules = [
        (divergence / 0.03, f"KL {divergence:.3g}: learning rate too high, lower it"),
        (0.0005 / divergence, f"KL {divergence:.3g}: learning rate too low, raise it"),
        (late.get("clip_fraction", 0) / 0.3, "clip fraction: learning rate too high, lower it"),
        (1 - late.get("explained_variance", 1), f"explained variance {late.get('explained_variance', 1):.2f}"),
    ]
    if first < 0 and "std" not in late:
        rules.append((0.05 * first / min(late["entropy_loss"], -1e-9), "entropy has collapsed: raise ent_coef"))
    return sorted((Line(strength, "setting", text) for strength, text in rules), reverse=True)


def check(make: Callable[[], gym.Env[Any, Any]]) -> list[Line]:
    """Return what the checks of Gymnasium and of SB3 say of an environment, without the numbers in it."""
    texts: list[str] = []
    checks: list[Callable[[Any], object]] = [
        lambda env: check_gymnasium_env(env, skip_render_check=True, skip_close_check=True),
        check_sb3_env,
    ]
    for look in checks:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                look(make())
            except Exception as failure:  # a failed assertion, or whatever a package raises
                texts.append(f"{type(failure).__name__}: {failure}")
        texts += [str(warning.message) for warning in heard]
    return [Line(1.0, "check", text) for text in dict.fromkeys(map(strip_numbers, texts))]


def strip_numbers(text: str) -> str:
    """Return the beginning of a text without its numbers and colours, which differ from run to run."""
    return re.sub(r"\x1b\[\d+m|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "", text)[:300]
