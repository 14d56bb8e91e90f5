"""`whence import`: rollouts that other programs have stored become the run that `whence.record` writes of them."""

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import stable_baselines3
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TransformObservation
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

import whence
from whence.cli.app import app
from whence.core import RunDirectoryError, WhenceError
from whence.stored import import_rollouts

STEPS = 150


class Near(gym.Wrapper[Any, Any, Any, Any]):
    """A cart pole whose infos hold a number, and whose episodes are short."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward - abs(observation[0]), terminated, truncated, {**info, "near": float(observation[0])}


def make_pole() -> gym.Env[Any, Any]:
    return Near(gym.make("CartPole-v1", max_episode_steps=12))


def make_parts() -> gym.Env[Any, Any]:
    """A cart pole whose observations are a nested dict."""
    space = gym.spaces.Dict({"b": gym.spaces.Dict({"x": gym.spaces.Box(-9, 9, (3,))}), "a": gym.spaces.Box(-9, 9, ())})
    return TransformObservation(make_pole(), lambda x: {"b": {"x": x[1:]}, "a": np.float32(x[0])}, space)


def make_lake() -> gym.Env[Any, Any]:
    return gym.make("FrozenLake-v1", max_episode_steps=12)


def play(env: gym.Env[Any, Any]) -> list[list[Any]]:
    """Play episodes by chance; of each the observations, one more than steps, and the rest of each step."""
    rng, episodes = np.random.default_rng(0), [[[env.reset(seed=3)[0]], []]]
    for at in range(STEPS):
        action = int(rng.integers(2))
        observation, reward, terminated, truncated, info = env.step(action)
        episodes[-1][0].append(observation)
        episodes[-1][1].append((action, reward, terminated, truncated, info))
        if (terminated or truncated) and at < STEPS - 1:
            episodes.append([[env.reset()[0]], []])
    env.close()
    assert {step[2:4] for _, steps in episodes for step in steps} >= {(True, False), (False, False)}
    return episodes


def stack(rows: list[Any]) -> Any:
    if isinstance(rows[0], Mapping):
        return {name: stack([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)


def read_columns(steps: list[Any]) -> dict[str, Any]:
    names = ("actions", "rewards", "terminations", "truncations")
    return {name: np.array([step[index] for step in steps]) for index, name in enumerate(names)}


def write_npz(path: Path, episodes: list[Any]) -> Path:
    steps = [step for _, steps in episodes for step in steps]
    columns = read_columns(steps)
    columns["terminated"], columns["truncated"] = columns.pop("terminations"), columns.pop("truncations")
    infos = {key: np.array([step[4][key] for step in steps]) for key in steps[0][4]}
    observations = np.concatenate([stack(seen[:-1]) for seen, _ in episodes])
    np.savez(path.with_suffix(".npz"), obs=observations, **columns, **infos, note=np.zeros(3))
    return path.with_suffix(".npz")


def write_dones(path: Path, episodes: list[Any]) -> Path:
    """Write what Stable-Baselines3 calls dones: ends of both kinds."""
    with np.load(write_npz(path, episodes)) as file:
        arrays = dict(file)
    arrays["dones"] = (arrays.pop("terminated") | arrays["truncated"]).astype(np.float32)
    arrays["actions"] = arrays["actions"][:, None]
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_hdf5(path: Path, episodes: list[Any]) -> Path:
    """Write a folder as Minari lays it out."""
    h5py = pytest.importorskip("h5py")
    (path / "data").mkdir(parents=True)

    def write(group: Any, tree: Any) -> None:
        for name, leaf in tree.items():
            write(group.create_group(name), leaf) if isinstance(leaf, Mapping) else group.create_dataset(
                name, data=leaf
            )

    with h5py.File(path / "data/main_data.hdf5", "w") as file:
        for number, (seen, steps) in enumerate(episodes):
            infos = {key: np.array([0.0, *(step[4][key] for step in steps)]) for key in steps[0][4]}
            rest = {"infos": {**infos, "note": {"deep": np.zeros(len(steps))}}}
            write(file.create_group(f"episode_{number}"), {"observations": stack(seen), **read_columns(steps), **rest})
    return path


def write_minari(path: Path, episodes: list[Any]) -> Path:
    """Write a folder by Minari itself."""
    minari = pytest.importorskip("minari")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MINARI_DATASETS_PATH", str(path))
        buffers = [
            minari.data_collector.EpisodeBuffer(
                id=number,
                observations=seen,
                infos={key: [0.0, *(step[4][key] for step in steps)] for key in steps[0][4]},
                **{key: [*column] for key, column in read_columns(steps).items()},
            )
            for number, (seen, steps) in enumerate(episodes)
        ]
        spaces = {"observation_space": gym.spaces.Box(-9, 9, (4,)), "action_space": gym.spaces.Discrete(2)}
        warnings.simplefilter("ignore")  # of what a published data set names
        minari.create_dataset_from_buffers(dataset_id="pole-v0", buffer=buffers, **spaces)
    return path / "pole-v0"


def write_lerobot(path: Path, episodes: list[Any]) -> Path:
    """Write a folder as LeRobot lays it out, an episode a file."""
    (path / "meta").mkdir(parents=True)
    (path / "data/chunk-000").mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps({"codebase_version": "v2.1", "total_frames": STEPS}))
    for number, (seen, steps) in enumerate(episodes):
        columns, count = read_columns(steps), len(steps)
        table = {
            "observation.state": pl.Series([row.tolist() for row in seen[:-1]], dtype=pl.List(pl.Float32)),
            "action": pl.Series([[action] for action in columns["actions"].tolist()]),
            "next.reward": columns["rewards"].astype(np.float32),
            "next.done": columns["terminations"] | columns["truncations"],
            "next.truncated": columns["truncations"],
            "next.near": [step[4]["near"] for step in steps],
            **{"episode_index": [number] * count, "frame_index": range(count), "timestamp": np.arange(count) / 50},
        }
        pl.DataFrame(table).write_parquet(path / f"data/chunk-000/episode_{number:06d}.parquet")
    return path


FORMATS: dict[str, tuple[Callable[[], Any], Callable[[Path, list[Any]], Path], list[str]]] = {
    "npz": (make_pole, write_npz, ["note"]),
    "npz of whole numbers": (make_lake, write_npz, ["note"]),
    "npz with dones": (make_pole, write_dones, ["note"]),
    "hdf5": (make_pole, write_hdf5, ["note"]),
    "hdf5 of dicts": (make_parts, write_hdf5, ["note"]),
    "Minari": (make_pole, write_minari, []),
    "LeRobot": (make_pole, write_lerobot, ["timestamp"]),
}


def read(run: whence.RunDirectory, name: Any) -> pl.DataFrame:
    return pl.concat([run.round(name, number) for number in run.rounds()])


def assert_same_runs(run: whence.RunDirectory, path: Path) -> None:
    """Hold a run to a recorded one: all columns of all records, and the episodes but for their generators."""
    recorded = whence.open_run(path)
    assert run.rounds() == recorded.rounds()
    assert len(run.rounds()) > 1
    assert_frame_equal(read(run, "records"), read(recorded, "records"), check_column_order=False)
    episodes = read(recorded, "episodes").with_columns(generator_state=pl.lit(None, pl.String))
    assert_frame_equal(read(run, "episodes"), episodes)
    assert_frame_equal(run.table("metrics"), recorded.table("metrics"))


@pytest.mark.parametrize("name", FORMATS)
def test_the_run_is_that_of_the_recorder(tmp_path: Path, name: str) -> None:
    make, write, not_read = FORMATS[name]
    file = write(tmp_path / "stored", play(whence.record(make(), tmp_path / "recorded", round=64)))
    run = import_rollouts(file, tmp_path / "run", round=64)
    assert_same_runs(run, tmp_path / "recorded")
    assert run.config["imported"]["not_read"] == not_read
    space = run.config["action_space"]
    assert (space["type"], space["n"]) == ("Discrete", 2)


def test_environments_stay_side_by_side(tmp_path: Path) -> None:
    envs: Any = SyncVectorEnv([make_pole] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = whence.record(envs, tmp_path / "recorded", round=192)
    rng, seen, rows = np.random.default_rng(0), envs.reset(seed=3)[0], []
    for _ in range(STEPS):
        actions = rng.integers(2, size=3)
        following, rewards, terminated, truncated, infos = envs.step(actions)
        near = np.where(terminated | truncated, infos.get("final_info", {}).get("near", 0.0), infos.get("near", 0.0))
        rows.append((seen.copy(), actions, rewards, terminated, truncated, near))
        seen = following
    envs.close()
    names = ("observations", "actions", "rewards", "terminated", "truncated", "near")
    arrays = {name: np.stack([row[index] for row in rows]) for index, name in enumerate(names)}
    np.savez(tmp_path / "stored.npz", **arrays)
    done = []
    on_steps = lambda *counts: done.append(counts)  # noqa: E731
    run = import_rollouts(tmp_path / "stored.npz", tmp_path / "run", round=192, on_steps=on_steps)
    assert_same_runs(run, tmp_path / "recorded")
    assert run.config["n_envs"] == 3
    assert done[-1] == (3 * STEPS, 3 * STEPS)


def walk(path: Path, swapped: int) -> None:
    """Store a walk on four lines that begin anew beyond 3, on one of which the actions are swapped."""
    rng, x, columns = np.random.default_rng(0), np.zeros(4), []
    for _ in range(2000):
        action, noise = rng.integers(2, size=4), rng.normal(size=(2, 4))
        after = x + np.where(np.arange(4) == swapped, -1, 1) * (action - 0.5) + 0.3 * noise[0]
        done = np.abs(after) > 3
        columns.append((np.stack([x, noise[1]], axis=1), action, 1 - np.abs(after), done))
        x = np.where(done, rng.normal(size=4), after)
    arrays = [np.stack(part) for part in zip(*columns, strict=True)]
    np.savez(path, **dict(zip(("obs", "act", "rew", "dones"), arrays, strict=True)))


@pytest.mark.parametrize("swapped", [2, pytest.param(-1, marks=pytest.mark.long)])
def test_findings_name_a_fault_of_one_environment(tmp_path: Path, swapped: int) -> None:
    walk(tmp_path / "walk.npz", swapped)
    titles = [one.title for one in whence.find(import_rollouts(tmp_path / "walk.npz", tmp_path / "run"))]
    assert any("do the opposite in environment 2" in title for title in titles) == (swapped == 2), titles


def test_commands_read_it_with_the_names_of_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    file, run, runner = write_npz(tmp_path / "pole", play(make_pole())), str(tmp_path / "run"), CliRunner()
    monkeypatch.setattr(gym, "make", None)  # nothing is made
    result = runner.invoke(app, ["import", str(file), "--out", run, "--env", "CartPole-v1", "--round", "100"])
    assert result.exit_code == 0, result.output
    assert "150 records in 2 rounds" in result.output
    assert "Not read: note." in result.output
    assert whence.open_run(run).config["max_episode_steps"] == 500
    for words in (("findings",), ("report",), ("show", "--record", "50")):
        result = runner.invoke(app, [words[0], run, *words[1:]])
        assert result.exit_code == 0, result.output
    assert "left" in result.output
    arrays, again = (whence.open_run(run).round("records", 1) for _ in range(2))
    with pytest.raises(RunDirectoryError, match="--overwrite"):
        import_rollouts(file, run, env="CartPole-v1", round=100)
    assert_frame_equal(arrays, again)
    assert import_rollouts(file, run, overwrite=True).rounds() == [1]


LONG = ("obs", "act", "rew") if np.dtype(np.longdouble).itemsize > 8 else ()
"""What is refused in 80 bits, where the machine has them."""


def make_arrays(**changes: Any) -> dict[str, Any]:
    arrays = {"obs": np.zeros((9, 2)), "act": np.zeros(9, int), "rew": np.zeros(9), "dones": np.zeros(9, bool)}
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rew": None}, "holds obs, act, dones; it also needs rewards or rew or next.reward"),
        ({"act": np.zeros(8)}, r"act of shape \(8,\)"),
        ({"dones": np.zeros((9, 2))}, r"dones of shape \(9, 2\)"),
        (dict.fromkeys(("obs", "act", "rew", "dones"), np.zeros((9, 1, 2))), r"rewards of \(9, 1, 2\)"),
        ({"obs": np.zeros((9, 0))}, r"obs of shape \(9, 0\)"),
        ({"act": np.zeros((9, 0))}, r"act of shape \(9, 0\)"),
        ({"dones": np.full(9, np.nan)}, "NaN in dones"),
        ({"truncated": np.full(9, np.nan)}, "NaN in truncated"),
        *(({name: np.zeros((9, 2)[: 1 + (name == "obs")], np.longdouble)}, "at most 64 bits") for name in LONG),
        ({"obs": np.array(["a"] * 9)}, "obs of shape .* dtype <U1"),
        ({"obs": np.array([{}] * 9)}, "allow_pickle"),
        (dict.fromkeys(("obs", "act", "rew", "dones"), np.zeros(0)), "no steps"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "stored.npz", **make_arrays(**changes))
    with pytest.raises(WhenceError, match=message):
        import_rollouts(tmp_path / "stored.npz", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(9, 3), (9, 1)])
@pytest.mark.parametrize("longer", [("dones",), ("rew", "dones"), ("rew", "dones", "act")])
def test_numbers_of_a_step_may_have_an_axis_of_one(
    tmp_path: Path, shape: tuple[int, int], longer: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    arrays = {"obs": rng.normal(size=(*shape, 2)), "act": rng.integers(3, size=shape), "rew": rng.normal(size=shape)}
    arrays["dones"] = np.add.outer(np.arange(9), 2 * np.arange(shape[1])) % 4 == 3
    np.savez(tmp_path / "short.npz", **arrays)
    np.savez(tmp_path / "long.npz", **{n: a[..., None] if n in longer else a for n, a in arrays.items()})
    tables = [read(import_rollouts(tmp_path / f"{n}.npz", tmp_path / n), "records") for n in ("short", "long")]
    assert_frame_equal(*tables)
    assert tables[1]["end"].count() == arrays["dones"].sum()


@pytest.mark.parametrize("name", ["obs", "act"])
def test_whole_numbers_of_a_wide_range_are_amounts(tmp_path: Path, name: str) -> None:
    wide = np.array([1, 2**63 + 2**20] * 20, np.uint64)
    arrays = {"obs": np.zeros((40, 2)), "act": np.zeros(40, int), "rew": np.ones(40), "dones": np.zeros(40, bool)}
    np.savez(tmp_path / "wide.npz", **arrays | {name: wide})
    run = import_rollouts(tmp_path / "wide.npz", tmp_path / "run")
    column = {"obs": "observation", "act": "action"}[name]
    assert run.config[f"{column}_space"]["type"] == "Box"
    assert read(run, "records")[column].cast(pl.Float64).to_list() == wide.astype(float).tolist()
    assert whence.inspect(run)


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", **make_arrays())
    whole = (tmp_path / "whole.npz").read_bytes()
    for name, content, message in (
        ("half.npz", whole[: len(whole) // 2], "cannot be read"),
        ("buffer.pkl", b"", "is a pickle(.|\n)*np.savez"),
        ("buffer", pickle.dumps(make_arrays()), "is a pickle"),
        ("table.csv", b"1,2", "table.csv is something else"),
        ("array.npy", b"\x93NUMPY\x01\x00", "array.npy is something else"),
        ("", None, "is something else"),
        ("half.hdf5", b"\x89HDF\r\n", r"cannot be read|pip install h5py"),
        ("missing.npz", None, "not there"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(WhenceError, match=message):
            import_rollouts(tmp_path / name, tmp_path / "run")
    with pytest.raises(WhenceError, match="env is 'Nowhere-v0'"):
        import_rollouts(tmp_path / "whole.npz", tmp_path / "run", env="Nowhere-v0")
    assert not (tmp_path / "run").exists()


def test_a_replay_buffer_is_exported_as_the_refusal_says(tmp_path: Path, monkeypatch: Any) -> None:
    model = stable_baselines3.DQN("MlpPolicy", make_pole(), buffer_size=100, learning_starts=200, seed=0)
    model.learn(STEPS)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WhenceError) as refusal:
        import_rollouts("buffer.pkl", "run")
    exec("\n".join(str(refusal.value).splitlines()[1:]), {"stable_baselines3": stable_baselines3, "np": np})
    run = import_rollouts("buffer.npz", "run", round=50)
    table, last = read(run, "records"), model.replay_buffer
    assert len(table) == 100
    assert np.array_equal(table["action"].to_numpy(), np.roll(last.actions[:, 0, 0], -last.pos))  # type: ignore[union-attr]
    ends = table.drop_nulls("end")["end"].to_list()
    assert ends.count("truncated") == last.timeouts.sum() > 0  # type: ignore[union-attr]
    assert len(ends) == last.dones.sum()  # type: ignore[union-attr]


def test_damaged_hdf5_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = write_hdf5(tmp_path / "stored", play(make_pole()))
    file = path / "data/main_data.hdf5"
    whole = file.read_bytes()

    def refuse(message: str) -> None:
        with pytest.raises(WhenceError, match=message):
            import_rollouts(path, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        file.write_bytes(whole)

    file.write_bytes(whole[: len(whole) // 2])
    refuse("cannot be read")
    with h5py.File(file, "a") as stored:
        del stored["episode_1/rewards"]
    refuse(r"episode_1 of .* also needs rewards")
    with h5py.File(file, "a") as stored:
        observations = stored["episode_1/observations"][:]
        del stored["episode_1/observations"]
        stored["episode_1/observations"] = observations[:, :3]
    refuse(r"Parts differ: steps of \(4,\) float32, and of \(3,\)")
    with h5py.File(file, "a") as stored:  # takes a terabyte, and no byte of the file
        del stored["episode_1/rewards"]
        stored.create_dataset("episode_1/rewards", (10**12 // 8,), "f8", chunks=(1024,))
    refuse("does not hold /episode_1/rewards")
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["secret"] = np.zeros((13, 4), np.float32)
    with h5py.File(file, "a") as stored:
        del stored["episode_1/observations"]
        stored["episode_1/observations"] = h5py.ExternalLink(str(tmp_path / "other.hdf5"), "secret")
    refuse("does not hold /secret")
    (tmp_path / "raw").write_bytes(bytes(208))
    with h5py.File(file, "a") as stored:
        del stored["episode_1/observations"]
        external = [(str(tmp_path / "raw"), 0, 208)]
        stored.create_dataset("episode_1/observations", (13, 4), "f4", external=external)
    refuse("does not hold /episode_1/observations")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "data/chunk-000/episode_000001.parquet").unlink(), "lacks frames"),
        (lambda folder: (folder / "data/chunk-000/episode_000001.parquet").write_bytes(b"PAR1"), "cannot be read"),
        (lambda folder: (folder / "meta/info.json").write_text("{"), "cannot be read"),
    ],
)
def test_damaged_lerobot_is_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = write_lerobot(tmp_path / "stored", play(make_pole()))
    damage(folder)
    with pytest.raises(WhenceError, match=message):
        import_rollouts(folder, tmp_path / "run")
