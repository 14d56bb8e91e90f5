"""What the detectors read of a run: records of rounds spread over it as columns, and the metrics of all rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from whence.findings.history import FEW, History, read_history, read_logged_history
from whence.runs import RunDirectory
from whence.scores import name_entries
from whence.stored import Logs
from whence.stored.agents import action_labels, box_action_labels, state_names

RECORDS = 40_000
"""Records that models are fitted on at most. Of a longer run, rounds of stretches spread over it are read; of these, if
they have more records, whole episodes."""

_LEAST_EPISODES = 32

_BYTES = 2**27
_STRETCHES = 8

_WIDEST = 256
_STATES = 64

Numbers = Float[np.ndarray, " n"]
Mask = Bool[np.ndarray, " n"]
Features = Mapping[str, Numbers]
Blocks = Mapping[str, NDArray[Any]]
"""The observation in parts (n, entries): a number each; of an image, a channel each."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """n records of a run, each environment's in the order of time.

    Attributes:
        config: the run's configuration.
        metrics: the table of that name, one row a round.
        columns: what each record has as one number, by name; unknown ones are NaN. `record_id`, `round`, `env_index`,
            `episode_id`, `step`, `reward`, `value` and `return` are used.
        actions: (n,) integers, or (n, axes) floats.
        action_names: of the discrete actions, or of the axes.
        features: the observation's numbers as the environment returned them, by name; an image's mean and spread by
            channel.
        blocks: the observation's parts as the environment returned them.
        ends: (n,) "terminated" or "truncated" at an episode's last record, "" elsewhere and where that is not known.
        normalised: the parts as the policy saw them, if VecNormalize changed them.
        digests: (n,) equal where observations are, also those that were too large to be stored; None: unknown.
        history: what the run was like in each of its rounds; None: it has few.
    """

    config: Mapping[str, Any]
    metrics: pl.DataFrame
    columns: Mapping[str, Numbers]
    actions: NDArray[Any]
    action_names: Sequence[str]
    features: Features
    blocks: Blocks
    ends: NDArray[np.str_]
    normalised: Blocks = field(default_factory=dict)
    digests: NDArray[Any] | None = None
    history: History | None = None

    def __len__(self) -> int:
        return len(self.actions)

    def thin(self, most: int) -> "Evidence":
        """Return whole episodes, drawn at random, of at most so many records; all if there are few episodes."""
        counts = np.bincount(self.episodes)
        order = np.random.default_rng(0).permutation(len(counts))
        fits = max(_LEAST_EPISODES, int((np.cumsum(counts[order]) <= most).sum()))
        if fits >= len(counts):
            return self
        rows = np.isin(self.episodes, order[:fits])

        def choose(part: Any) -> Any:
            """Return these records of an array, of each of a mapping's, or of nothing."""
            if isinstance(part, Mapping):
                return {name: choose(values) for name, values in part.items()}
            return None if part is None else part[rows]

        names = ("columns", "actions", "features", "blocks", "ends", "normalised", "digests")
        return replace(self, **{name: choose(getattr(self, name)) for name in names})

    @cached_property
    def has_next(self) -> Mask:
        """Whether the record after it, in this order, is the next one of its episode."""
        step, episode, env = (self.columns[name] for name in ("step", "episode_id", "env_index"))
        joins = (env[1:] == env[:-1]) & (episode[1:] == episode[:-1]) & (step[1:] == step[:-1] + 1)
        return np.append(joins, False)

    @cached_property
    def last_step(self) -> float:
        """The largest step of an episode, from 0; 0 if no episode's beginning was seen."""
        return float(np.nanmax(self.columns["step"], initial=0.0))

    @cached_property
    def episodes(self) -> Int[np.ndarray, " n"]:
        """The number of each record's episode, from 0."""
        return np.unique(self.columns["episode_id"], return_inverse=True)[1]

    @cached_property
    def is_whole(self) -> Bool[np.ndarray, " e"]:
        """Whether each episode was read from its first step to its end."""
        sides = (self.columns["step"] == 0).astype(int) + (self.ends != "")
        return np.asarray(np.bincount(self.episodes, sides) == 2)

    @property
    def is_table(self) -> bool:
        """Whether the observation is one whole number: of states that are next to each other in number alone."""
        return len(self.features) == 1 and all((values % 1 == 0).all() for values in self.features.values())

    @cached_property
    def state(self) -> Float[np.ndarray, "n d"]:
        """The observation as a few standardised numbers; one of few states as indicators, of many as nothing."""
        values = np.stack(list(self.features.values()), axis=1) if self.features else np.zeros((len(self), 0))
        if self.is_table:
            distinct = np.unique(values)
            return np.asarray(values == distinct[: len(distinct) if len(distinct) <= _STATES else 0], dtype=np.float64)
        spread = values.std(axis=0)
        varies = spread > 1e-9 * np.abs(values).max(axis=0, initial=0.0)  # not by rounding alone
        values = (values - values.mean(axis=0))[:, varies] / spread[varies]
        if values.shape[1] > FEW:
            values = values @ np.linalg.eigh(values.T @ values / len(self))[1][:, -FEW:]
            values = values / np.maximum(values.std(axis=0), 1e-9)
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def acting(self) -> Float[np.ndarray, "n k"]:
        """The action as numbers: indicators of discrete ones; else the axes and their squares."""
        if self.actions.ndim == 1:
            return np.asarray(np.eye(len(self.action_names))[self.actions], dtype=np.float64)
        return np.asarray(np.hstack([self.actions, self.actions**2]), dtype=np.float64)


def read_evidence(run: RunDirectory) -> Evidence | None:
    """Read a run of an agent; None if no round of it holds what the detectors need."""
    tables = [run.round("records", each).with_columns(round=pl.lit(each)) for each in _choose_rounds(run)]
    table = pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    evidence = make_evidence(table, run.config, run.table("metrics"))
    return None if evidence is None else replace(evidence, history=read_history(run))


def make_log_evidence(logs: Logs) -> Evidence:
    """Return what logs hold: metrics, the learning rate if it stays the same, and no records."""
    name = "train/learning_rate"
    rates = logs.metrics[name].drop_nulls().unique().to_list() if name in logs.metrics.columns else []
    settings = {"learning_rate": rates[0]} if len(rates) == 1 else {}
    actions = np.zeros((0, logs.axes) if logs.axes else 0)
    nothing = Evidence({"hyperparameters": settings}, logs.metrics, {}, actions, [], {}, {}, np.zeros(0, dtype=str))
    return replace(nothing, history=read_logged_history(logs.metrics))


def make_evidence(table: pl.DataFrame, config: Mapping[str, Any], metrics: pl.DataFrame) -> Evidence | None:
    """Return what a table of records holds; None if it lacks what the detectors need."""
    if not {"env_index", "episode_id", "step", "action", "reward"} <= set(table.columns):
        return None
    table = table.sort("env_index", "record_id")
    blocks, raw = (_read_blocks(table, config, name) for name in ("observation", "raw_observation"))
    names = "record_id", "round", "env_index", "episode_id", "step", "reward", "value", "return"
    columns = {name: _read_column(table, name) for name in names}
    actions, labels = _read_actions(table, config)
    return Evidence(
        config=config,
        metrics=metrics,
        columns=columns,
        actions=actions,
        action_names=labels,
        features=summarise(raw or blocks),
        blocks=raw or blocks,
        normalised=blocks if raw else {},
        ends=table["end"].fill_null("").to_numpy().astype(str) if "end" in table.columns else np.full(len(table), ""),
        digests=table["observation_digest"].to_numpy() if _is_whole(table, "observation_digest") else None,
    )


def summarise(blocks: Blocks) -> dict[str, Numbers]:
    """Return parts of the observation as numbers: those of several entries as their mean and spread."""
    features: dict[str, Numbers] = {name: values[:, 0] for name, values in blocks.items() if values.shape[1] == 1}
    for name, values in blocks.items():
        if values.shape[1] > 1:
            features |= {f"{name} mean": values.mean(axis=1), f"{name} spread": values.std(axis=1, dtype=np.float32)}
    return {name: values.astype(np.float64) for name, values in features.items()}


def _choose_rounds(run: RunDirectory) -> list[int]:
    """Return all rounds if they are few, else as many in stretches that are spread over the run."""
    rounds = run.rounds()
    if not rounds:
        return []
    first, last = (run.round("records", number) for number in (rounds[0], rounds[-1]))
    width = max(1, int(last.estimated_size() / max(1, len(last))))
    most = max(_STRETCHES, min(RECORDS, _BYTES // width) // max(1, len(first), len(last)))
    if len(rounds) <= most:
        return rounds
    length = most // _STRETCHES
    starts = np.linspace(0, len(rounds) - length, _STRETCHES).astype(int)
    return sorted({rounds[start + offset] for start in starts for offset in range(length)})


def _is_whole(table: pl.DataFrame, name: str) -> bool:
    return name in table.columns and not table[name].null_count()


def _read_column(table: pl.DataFrame, name: str) -> Numbers:
    if name not in table.columns:
        return np.full(len(table), np.nan)
    return table[name].cast(pl.Float64).fill_null(np.nan).to_numpy()


def _read_actions(table: pl.DataFrame, config: Mapping[str, Any]) -> tuple[NDArray[Any], list[str]]:
    actions, space = np.asarray(table["action"].to_numpy()), config.get("action_space") or {}
    if actions.ndim == 1 and actions.dtype.kind in "iu":
        actions = actions - int(space.get("start", 0) or 0)
        names = action_labels(config.get("env"), config) or []
        plain = [str(i) for i in range(max(int(space.get("n", 0) or 0), int(actions.max()) + 1))]
    else:
        actions = actions.reshape(len(table), -1).astype(np.float64)
        bounds = space.get("low", "-inf"), space.get("high", "inf")
        actions = np.clip(actions, *(np.asarray(each, dtype=np.float64).reshape(-1) for each in bounds))  # as SB3 does
        names = box_action_labels(config.get("env"), config) or []
        plain = [f"a{i}" for i in range(actions.shape[1])]
    return actions, [*map(str, names[: len(plain)]), *plain[len(names) :]]


def _read_blocks(table: pl.DataFrame, config: Mapping[str, Any], root: str) -> dict[str, NDArray[Any]]:
    """Return the parts of a column of observations by name: numbers; of an image, channels; else the whole."""
    blocks: dict[str, NDArray[Any]] = {}
    for column in (name for name in table.columns if name.split(".")[0] == root and _is_whole(table, name)):
        values = np.asarray(table[column].to_numpy()).reshape(len(table), -1)
        key, space = column.partition(".")[2], config.get("observation_space") or {}
        for part in filter(None, key.split(".")):
            space = (space.get("spaces") or {}).get(part) or {}
        shape: tuple[int, ...] = tuple(space.get("shape") or ())
        width = values.shape[1]
        if len(shape) == 3 and math.prod(shape) == width > FEW:
            channels = np.moveaxis(values.reshape(-1, *shape), 1 if shape[0] <= shape[2] else 3, 0)
            prefix = f"{key} " if key else ""
            blocks |= {f"{prefix}channel {i}": each.reshape(len(table), -1) for i, each in enumerate(channels)}
        elif width > _WIDEST:
            blocks[key or "the observation"] = values
        else:
            entries = name_entries(key, width, state_names(config.get("env"), config))
            blocks |= {name: values[:, i : i + 1] for i, name in enumerate(entries)}
    return blocks
