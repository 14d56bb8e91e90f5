"""Rollouts that another program has stored, made a run directory; nothing in them runs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import polars as pl
from gymnasium import spaces
from numpy.typing import NDArray

from whence.core import WhenceError, explain_damage, first_line, named_leaves, take
from whence.runs import RunDirectory
from whence.sb3.episodes import find_object
from whence.sb3.models import describe_env
from whence.sb3.recording import Recording

Columns: TypeAlias = dict[str, Any]
"""Arrays, or nested dicts of them, by their names in a file; what HDF5 holds is read when it is sliced."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "observations": ("observations", "obs", "observation.state"),
    "actions": ("actions", "act", "action"),
    "rewards": ("rewards", "rew", "next.reward"),
    "terminated": ("terminations", "terminated", "dones", "next.done"),
    "truncated": ("truncations", "truncated", "next.truncated"),
}
"""What files call the parts of a step; of several names the first counts. Only `truncated` may be missing."""

_KNOWN = {name for names in _NAMES.values() for name in names}

_DENSEST = 1100
"""How many bytes one stored byte may become; zlib reaches 1032."""

_WIDEST = 8
"""Bytes of a number at most: tables have no wider ones."""

_STATES = 2**16
"""Whole numbers that are names of states or actions; where there are more, they are amounts."""

_PICKLE = """{path} is a pickle, as replay buffers of Stable-Baselines3 are; reading it could run code. \
Write an .npz in your own script, and import that:
b = stable_baselines3.common.save_util.load_from_pkl({name!r})
i = (np.arange(b.size()) + b.pos * b.full) % b.buffer_size  # the oldest first
np.savez("buffer.npz", obs=b.observations[i], act=b.actions[i], rew=b.rewards[i], dones=b.dones[i], \
truncated=b.timeouts[i])"""


class _Part(NamedTuple):
    """Steps that follow each other: T, or (T, n) of n environments; observations and infos may have one row more."""

    observations: Any
    actions: Any
    rewards: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Columns


def import_rollouts(
    file: str | Path,
    run: str | Path,
    *,
    env: str | None = None,
    round: int = 2048,
    overwrite: bool = False,
    on_steps: Callable[[int, int], None] | None = None,
) -> RunDirectory:
    """Make a run directory of rollouts that another program has stored, for findings, the page and `whence show`.

    Files are `.npz`, Minari's data sets (`pip install h5py`), and LeRobot's without their videos; nothing in them runs.
    An `.npz` has `observations`, `actions`, `rewards`, `terminations` or `dones`, and perhaps `truncations`, of shape
    (T, n, ...) of n environments or (T, ...) of one: row t holds the observation before action t, and whether the
    episode ends with it. Further numbers of each step are infos. The configuration lists under `imported` what is not
    read.

    Args:
        file: the file, or the folder of a data set.
        run: the directory to write to.
        env: the id of the Gymnasium environment, or module:Id, for the names of actions and the time limit. The module
            is imported; the environment is looked up and not made.
        round: the steps of all environments that are a round.
        overwrite: delete the run that the directory holds.
        on_steps: called with the number of steps that are written, and of all.

    Raises:
        WhenceError: the file is damaged, lacks a column, or is a pickle; or `env` is not registered.
        RunDirectoryError: the directory holds a run.
    """
    path, spec = Path(file), None if env is None else _find_spec(env)
    remedy = "A whole file with arrays of numbers is needed."
    with ExitStack() as stack, explain_damage(path, "rollouts", "h5py", remedy):
        kind, tables, others = _read(path, stack)
        used: set[str] = set()
        parts = [part for place, columns in tables if (part := _make_part(place, columns, used)).rewards.size]
        if not parts:
            raise WhenceError(f"{path} holds no steps.")
        shape, total = parts[0].rewards.shape, sum(part.rewards.size for part in parts)
        observed, acted = (_guess_space([part[index] for part in parts], len(shape)) for index in range(2))
        not_read = sorted({*others}.union(*(columns for _, columns in tables)) - used)
        config = describe_env(spec, []) | {"imported": {"file": path.name, "format": kind, "not_read": not_read}}
        RunDirectory.find_start(run, config, start="anew", overwrite=overwrite)  # nothing is added to a run
        count, done = shape[1] if len(shape) == 2 else None, 0
        recording = Recording(run, config, spaces=(observed, acted), count=count, length=round, overwrite=overwrite)
        with closing(recording):
            for part in parts:
                for steps in _record(part, recording, acted):
                    done += steps
                    if on_steps is not None and (done % 1024 < steps or done == total):
                        on_steps(done, total)
    return RunDirectory.open(run)


def _find_spec(env: str) -> Any:
    """Return the registration of an environment, which is not made."""
    module, _, name = env.rpartition(":")
    try:
        return (not module or find_object(module)) and gym.spec(name)
    except (ImportError, gym.error.Error) as error:
        raise WhenceError(f"env is {env!r}; a registered id or module:Id is needed: {first_line(error)}") from None


def _record(part: _Part, recording: Recording, acted: spaces.Space[Any]) -> Iterator[int]:
    """Record the rows of a part, and yield the steps of each."""
    shape, last = part.rewards.shape, len(part.rewards) - 1
    observations = take(part.observations, slice(last + 1))
    dtype = acted.dtype if isinstance(acted, spaces.Box) else None
    actions = np.asarray(part.actions[:], dtype).reshape(*shape, *(acted.shape or ()))
    infos = {name: np.asarray(column[len(column) - last - 1 :]) for name, column in part.infos.items()}
    recording.start(take(observations, 0), {})
    for at in range(last + 1):
        ends, row = (part.terminated[at], part.truncated[at]), take(infos, at)
        rows = [row] if len(shape) == 1 else [take(row, index) for index in range(shape[1])]
        recording.add(actions[at], part.rewards[at], ends, take(observations, min(at + 1, last)), rows)
        yield part.rewards[at].size


def _make_part(place: str, columns: Columns, used: set[str]) -> _Part:
    """Return what the columns of a file are, and add the names of those that are read to `used`."""
    called = {key: next((name for name in names if name in columns), "") for key, names in _NAMES.items()}
    if missing := [" or ".join(_NAMES[key]) for key in called if not called[key] and key != "truncated"]:
        raise WhenceError(f"{place} holds {', '.join(columns) or 'nothing'}; it also needs {', '.join(missing)}.")
    chosen = {key: columns[name] for key, name in called.items() if name}
    steps = chosen["rewards"].shape
    steps = steps[:2] if steps[2:] == (1,) else steps
    longer = (*(length + 1 for length in steps[:1]), *steps[1:])
    for key, tree in chosen.items():
        leaves: Any = named_leaves(tree, called[key])
        for name, leaf in leaves:
            axes, rest = leaf.shape[: len(steps)], leaf.shape[len(steps) :]
            fits = axes == steps or (key == "observations" and axes == longer)
            fits &= 0 not in rest if key in ("observations", "actions") else rest in ((), (1,))
            is_number = leaf.dtype.kind in "biuf" and leaf.dtype.itemsize <= _WIDEST
            if len(steps) not in (1, 2) or not fits or not is_number:
                raise WhenceError(
                    f"{place} holds {name} of shape {leaf.shape} and dtype {leaf.dtype}, and rewards of {steps}. "
                    "Numbers of (steps, ...), or (steps, environments, ...), are needed, as many in each, of at most "
                    f"{8 * _WIDEST} bits."
                )
    others = {name: leaf for name, leaf in columns.items() if name not in _KNOWN and not isinstance(leaf, Mapping)}
    infos = {n: leaf for n, leaf in others.items() if leaf.shape in (steps, longer) and leaf.dtype.kind in "biuf"}
    used.update(called.values(), infos)
    names = ("rewards", "terminated", "truncated")
    rewards, *ends = (np.reshape(chosen.get(key, np.zeros(steps)), steps) for key in names)
    for key, each in zip(names[1:], ends, strict=True):
        if np.isnan(each).any():
            raise WhenceError(f"{place} holds NaN in {called[key]}: each entry needs to be 0 or 1.")
    terminated, truncated = (each.astype(bool) for each in ends)
    if "done" in called["terminated"]:  # which are ends of both kinds
        terminated &= ~truncated
    return _Part(chosen["observations"], chosen["actions"], rewards, terminated, truncated, infos)


def _guess_space(trees: Sequence[Any], axes: int) -> spaces.Space[Any]:
    """Return a space that holds observations or actions, of arrays whose first axes are no part of them."""
    first = trees[0]
    if isinstance(first, Mapping):
        return spaces.Dict([(name, _guess_space([tree[name] for tree in trees], axes)) for name in first])
    shape = first.shape[axes:]
    if differing := [leaf for leaf in trees if leaf.shape[axes:] != shape or leaf.dtype != first.dtype]:
        came = f"{differing[0].shape[axes:]} {differing[0].dtype}"
        raise WhenceError(f"Parts differ: steps of {shape} {first.dtype}, and of {came}. One of both is needed.")
    if first.dtype.kind != "f" and np.prod(shape) == 1:
        ends = [end for leaf in trees if leaf.size for end in (int(np.min(leaf)), int(np.max(leaf)))]
        start = min(0, *ends)
        if max(ends) - start < _STATES:
            return spaces.Discrete(max(ends) - start + 1, start=start)
        return spaces.Box(-np.inf, np.inf, shape, np.float64)
    if first.dtype.kind == "b":
        return spaces.MultiBinary(shape)
    limits = np.iinfo(first.dtype) if first.dtype.kind != "f" else None
    low, high = (-np.inf, np.inf) if limits is None else (limits.min, limits.max)
    return spaces.Box(low, high, shape, first.dtype.type)


def _read(path: Path, stack: ExitStack) -> tuple[str, list[tuple[str, Columns]], list[str]]:
    """Return the format, the columns of each part with their place, and names of what is not read."""
    if (path / "meta/info.json").is_file():
        return "LeRobot", *_read_lerobot(path)
    for file in (path, path / "main_data.hdf5", path / "data/main_data.hdf5"):
        if file.suffix in (".hdf5", ".h5") and file.is_file():
            return "Minari", _read_minari(file, stack), []
    begins = b""
    if path.is_file():
        with path.open("rb") as stream:
            begins = stream.read(2)
    if begins[:1] == b"\x80" or path.suffix in (".pkl", ".pickle"):
        raise WhenceError(_PICKLE.format(path=path, name=path.name))
    if begins != b"PK":  # of a zip
        came = "something else" if path.exists() else "not there"
        raise WhenceError(f"{path} is {came}. Give an .npz, or the folder of a data set of Minari's or LeRobot's.")
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return "npz", [(str(path), dict(arrays))], []


def _read_minari(path: Path, stack: ExitStack) -> list[tuple[str, Columns]]:
    import h5py

    file = stack.enter_context(h5py.File(path, "r"))

    def list_columns(group: Any) -> Columns:
        columns = {name: list_columns(leaf) if isinstance(leaf, h5py.Group) else leaf for name, leaf in group.items()}
        for leaf in (leaf for leaf in columns.values() if not isinstance(leaf, dict)):
            # A small file can name what is large, or lies in other files.
            is_elsewhere = leaf.file.filename != file.filename or leaf.external or leaf.is_virtual
            if is_elsewhere or leaf.nbytes > _DENSEST * leaf.id.get_storage_size():
                raise WhenceError(f"{path} does not hold {leaf.name}, of {leaf.nbytes} bytes, in itself.")
        return columns

    episodes = {int(name[8:]): list_columns(file[name]) for name in file if name.startswith("episode_")}
    for columns in episodes.values():
        columns.update({name: leaf for name, leaf in columns.pop("infos", {}).items() if name not in columns})
    return [(f"episode_{number} of {path}", episodes[number]) for number in sorted(episodes)]


def _read_lerobot(path: Path) -> tuple[list[tuple[str, Columns]], list[str]]:
    """Return the columns of each episode, and the names of what is not read."""
    table = pl.scan_parquet(sorted(path.glob("data/chunk-*/*.parquet")), glob=False)
    names, places = table.collect_schema().names(), ["episode_index", "frame_index"]
    wanted = [name for name in names if name in _KNOWN or name.startswith("next.")]
    rows = table.select(*places, *wanted).collect().sort(places)
    frames = rows.select(pl.int_range(pl.len()).over(places[0])).to_series()
    needed = json.loads((path / "meta/info.json").read_text(encoding="utf-8")).get("total_frames", len(rows))
    if len(rows) != needed or (rows["frame_index"] != frames).any():
        raise WhenceError(f"{path} lacks frames: it holds {len(rows)} of {needed}, and all of an episode are needed.")
    parts = {}
    for (number, *_), episode in rows.partition_by(places[:1], maintain_order=True, as_dict=True).items():
        columns = {name if name in _KNOWN else name[5:]: episode[name] for name in wanted}
        lists = {name: each.list.to_array(len(each[0])) for name, each in columns.items() if each.dtype == pl.List}
        parts[f"Episode {number} of {path}"] = {name: each.to_numpy() for name, each in (columns | lists).items()}
    return [*parts.items()], [name for name in names if name not in (*places, *wanted)]
