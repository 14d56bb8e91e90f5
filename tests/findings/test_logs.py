"""Findings on logs that other libraries wrote, where no run directory exists."""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor

import whence as library
from whence import RunDirectory, WhenceError
from whence.findings import open_run_or_logs
from whence.stored.logs import AGENT_NAMES, LANGUAGE_NAMES, Logs, read_logs

RECORDLESS = {"a return that fell", "large steps", "small steps", "lost entropy", "settings of rounds"}
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
DOCS = Path(__file__).parents[2] / "docs"


def train(folder: Path, rate: float, env: str = "CartPole-v1", **settings: Any) -> Path:
    """Train for 2,000 steps with all the logs that SB3 can write."""
    model = PPO("MlpPolicy", Monitor(gym.make(env), str(folder / "0")), rate, n_steps=128, seed=0, **settings)
    model.set_logger(configure(str(folder), ["csv", "tensorboard"] if HAS_TENSORBOARD else ["csv"]))
    evaluation = EvalCallback(Monitor(gym.make(env)), eval_freq=1000, log_path=str(folder), verbose=0)
    model.learn(2000, callback=evaluation)
    model.logger.close()
    model.get_env().close()
    evaluation.eval_env.close()
    return folder


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("healthy"), 1e-3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("small"), 1e-7, n_epochs=4)


def titles(path: Path) -> list[str]:
    return [finding.title for finding in library.find(path)]


def outcomes(path: Path) -> dict[str, str]:
    return {check.name: check.outcome for check in library.inspect(path)}


def log_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def log_state(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the state of a trainer as Transformers does."""
    from transformers import TrainerState

    TrainerState(log_history=[{"step": step, **row} for step, row in enumerate(rows, 1)]).save_to_json(str(path))
    return path


def log_events(folder: Path, columns: Mapping[str, Sequence[float]]) -> Path:
    """Write TensorBoard's events as CleanRL does."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_text("hyperparameters", "|param|value|\n|-|-|\n|gamma|0.99|")
        for name, values in columns.items():
            for step, value in enumerate(values, 1):
                writer.add_scalar(name, value, step * 128)
    return folder


def test_a_healthy_training_has_no_line_and_a_folder_is_read_together(healthy: Path) -> None:
    assert {path.name for path in healthy.iterdir()} >= {"progress.csv", "0.monitor.csv", "evaluations.npz"}
    assert titles(healthy) == []
    seen = outcomes(healthy)
    assert {name for name, outcome in seen.items() if outcome == "fine"} == RECORDLESS - {"settings of rounds"}
    logs = open_run_or_logs(healthy)
    assert isinstance(logs, Logs)
    assert {"episode_return", "test_return", "train/approx_kl"} <= {*logs.metrics.columns}
    assert logs.metrics["test_return"].count() == 2
    assert "train/policy_gradient_loss" in logs.not_read


def test_a_learning_rate_that_is_too_low(small: Path) -> None:
    (title,) = titles(small)
    assert title.startswith("The policy hardly moves")
    assert title.endswith("the learning rate is 1e-07")
    assert outcomes(small / "progress.csv")["small steps"] == "wrong"


def test_a_learning_rate_that_is_too_high(tmp_path: Path) -> None:
    (title,) = titles(train(tmp_path, 3e-2, "FrozenLake-v1"))
    assert title.startswith("Updates throw the policy about")


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="TensorBoard is not installed: pip install '.[tensorboard]'")
def test_events_say_what_the_table_says(small: Path) -> None:
    (events,) = small.glob("*tfevents*")
    tables = [read_logs(path).metrics for path in (events, small / "progress.csv")]
    for name in ("train/approx_kl", "train/entropy_loss", "episode_return"):
        values = [table[name].drop_nulls().to_numpy() for table in tables]
        np.testing.assert_allclose(*values, rtol=1e-5)


def test_every_detector_that_needs_records_says_why(small: Path) -> None:
    texts = {check.name: check.text for check in library.inspect(small) if check.outcome == "could not be looked at"}
    assert texts.pop("settings of rounds").endswith("its settings are not known")
    assert {*texts.values()} == {"because logs hold no records"}
    assert not {*texts} & RECORDLESS


def test_returns_of_episodes_are_a_mean_of_a_hundred(tmp_path: Path) -> None:
    for env, start in ((0, 0), (1, 1)):  # they end by turns, each after two steps
        lines = [f"{2 * number + start},2,{number + start / 2}" for number in range(100)]
        text = "\n".join(['#{"t_start": 5.0, "env_id": "x"}', "r,l,t", *lines])
        (tmp_path / f"{env}.monitor.csv").write_text(text + "\n", encoding="utf-8")
    values = read_logs(tmp_path).metrics["episode_return"]
    assert values[9] == np.mean(range(10))
    assert values[199] == np.mean(range(100, 200))
    rounds = "time/total_timesteps,train/approx_kl\n21,0.01\n400,0.02\n"
    (tmp_path / "progress.csv").write_text(rounds, encoding="utf-8")
    assert read_logs(tmp_path).metrics["episode_return"].to_list() == [4.5, 149.5]


CLEANRL: dict[str, Sequence[float]] = {
    "charts/learning_rate": [2.5e-4] * 40,
    "losses/approx_kl": [0.01] * 40,
    "losses/entropy": [1.79] * 40,
    "charts/episodic_return": [20.0, 30.0] * 20,
}
FALLING = {"losses/entropy": np.linspace(1.79, 0.01, 40).tolist()}


def log_table(folder: Path, columns: Mapping[str, Sequence[float]]) -> Path:
    folder.mkdir(exist_ok=True)
    pl.DataFrame({name: list(values) for name, values in columns.items()}).write_csv(folder / "metrics.csv")
    return folder


@pytest.mark.parametrize("log", [log_events, log_table])
def test_names_of_cleanrl(log: Callable[[Path, Mapping[str, Sequence[float]]], Path], tmp_path: Path) -> None:
    assert titles(log(tmp_path / "healthy", CLEANRL)) == []
    logs = read_logs(tmp_path / "healthy")
    np.testing.assert_allclose(logs.metrics["train/entropy_loss"].drop_nulls().to_numpy(), -1.79, rtol=1e-6)
    (title,) = titles(log(tmp_path / "falling", CLEANRL | FALLING))
    assert title.startswith("The policy's entropy fell from 1.79 to")
    (title,) = titles(log(tmp_path / "small", CLEANRL | {"losses/approx_kl": [1e-6] * 40}))
    assert title.startswith("The policy hardly moves: by 1e-06 nats a round")
    (title,) = titles(log(tmp_path / "large", CLEANRL | {"losses/approx_kl": [2.0] * 40}))
    assert title.startswith("Updates throw the policy about: by 2 nats a round")
    rising = {"charts/episodic_return": [float(value) for value in range(40)]}
    assert titles(log(tmp_path / "learning", CLEANRL | FALLING | rising)) == []  # an entropy that pays is learning


@pytest.mark.parametrize(
    ("first", "last", "axes"),
    [(0.69, 0.01, 0), (1.79, 0.01, 0), (1.43, 0.2, 1), (8.4, 1.0, 6), (2.2, -0.1, 2)],
)
def test_actions_are_continuous_if_their_entropy_is_that_of_axes(
    first: float, last: float, axes: int, tmp_path: Path
) -> None:
    entropy = np.linspace(first, last, 40)
    assert read_logs(log_table(tmp_path, CLEANRL | {"losses/entropy": entropy})).axes == axes


def test_an_entropy_of_continuous_actions_is_measured_by_an_axis(tmp_path: Path) -> None:
    returns = [1.0, 2.0] * 20
    columns = {"Train/mean_reward": returns, "Loss/entropy": np.linspace(8.5, -8.0, 40)}
    spread = np.exp(np.linspace(0.0, -2.75, 40))  # six axes
    seen = {check.name: check for check in library.inspect(log_table(tmp_path / "six", columns))}
    assert seen["lost entropy"].outcome == "wrong"  # by (8.5 - -8) / 6 axes / ln 10: 1.2 decades
    columns |= {"Policy/mean_noise_std": spread}
    (finding,) = library.find(log_table(tmp_path / "known", columns))
    assert finding.title.startswith("The policy's entropy fell from 1.42 to")
    steady = {
        "Train/mean_reward": returns,
        "Loss/entropy": np.full(40, -3.0),
        "Policy/mean_noise_std": np.full(40, 0.2),
    }
    assert titles(log_table(tmp_path / "steady", steady)) == []


def test_rounds_of_one_epoch_have_no_divergence(tmp_path: Path) -> None:
    columns = {"time/iterations": range(1, 11), "train/n_updates": range(10), "train/approx_kl": [0.0] * 10}
    columns |= {"rollout/ep_rew_mean": [1.0] * 10}
    assert outcomes(log_table(tmp_path, columns))["small steps"] == "could not be looked at"
    assert outcomes(log_table(tmp_path, columns | {"train/n_updates": range(0, 100, 10)}))["small steps"] == "wrong"


GRPO = {"kl": 0.01, "entropy": 0.5, "reward": 0.4, "completions/mean_length": 50.0, "completions/clipped_ratio": 0.1}
COLLAPSED = {"kl": 1.5, "entropy": 0.01, "completions/clipped_ratio": 1.0}
VERL = {
    "actor/entropy": 0.5,
    "actor/kl_loss": 0.01,
    "actor/ppo_kl": 1e-4,
    "critic/score/mean": 0.4,
    "response_length/mean": 50.0,
    "response_length/clip_ratio": 0.1,
}
OPENRLHF = {"policy_loss": 0.1, "kl": 0.01, "entropy_loss": 0.5, "response_length": 50.0, "reward": 0.4}


def log_verl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    return log_lines(path, [{"step": step, "data": row} for step, row in enumerate(rows, 1)])


LANGUAGE = [
    (log_state, "trainer_state.json", GRPO, COLLAPSED),
    (
        log_verl,
        "metrics.jsonl",
        VERL,
        {"actor/entropy": 0.01, "actor/kl_loss": 1.5, "response_length/clip_ratio": 1.0},
    ),
    (log_lines, "train.jsonl", OPENRLHF, {"kl": 1.5, "entropy_loss": 0.01}),
]


@pytest.mark.parametrize(("log", "name", "row", "collapsed"), LANGUAGE)
def test_language_models(
    log: Any, name: str, row: dict[str, float], collapsed: dict[str, float], tmp_path: Path
) -> None:
    path = log(tmp_path / name, [row] * 12)
    assert titles(path) == []
    logs = read_logs(path)
    assert logs.is_language
    (first, *_) = logs.metrics.to_dicts()
    known = {"round": 1, "kl": 0.5, "train/entropy_loss": -0.5, "length": 50.0, "reward": 0.4}
    assert {column: first[column] for column in known} == pytest.approx(known)
    assert first.get("ended_share", 0.9) == pytest.approx(0.9)
    findings = library.find(log(tmp_path / name, [row] * 5 + [row | collapsed] * 5))
    text = " ".join(finding.title for finding in findings)
    assert {finding.round for finding in findings} == {6}
    assert "divergence from the start model is 75 nats a response" in text
    assert "fell from 0.5 in the first round to 0.01" in text
    assert ("0% end before the length limit, 90% did" in text) == ("ended_share" in logs.metrics.columns)


def test_a_language_model_has_no_figures_of_agents(tmp_path: Path) -> None:
    seen = {check.name: check for check in library.inspect(log_state(tmp_path / "trainer_state.json", [GRPO] * 9))}
    assert len(seen) == 13
    assert seen["rewards that rise while another falls"].text == "because logs hold no records"
    assert seen["dropped responses"].outcome == "could not be looked at"


def test_what_needs_a_length_is_not_read_without_one(tmp_path: Path) -> None:
    row = {"reward": 0.4, "kl": 30.0, "entropy": 0.01, "loss": 1.0}
    logs = read_logs(log_state(tmp_path / "trainer_state.json", [row] * 3))
    assert {"kl", "entropy", "loss"} <= {*logs.not_read}
    assert {*logs.metrics.columns} == {"round", "reward"}


def test_events_of_a_language_model_have_a_prefix(tmp_path: Path) -> None:
    logs = read_logs(log_events(tmp_path, {f"train/{name}": [value] * 9 for name, value in OPENRLHF.items()}))
    assert logs.is_language
    assert logs.metrics["train/entropy_loss"][0] == pytest.approx(-0.5)  # not SB3's, which is minus the entropy
    assert logs.metrics["kl"][0] == pytest.approx(0.5)
    assert {*logs.not_read} == {"train/policy_loss"}


def test_no_name_means_two_things() -> None:
    for known in (AGENT_NAMES, LANGUAGE_NAMES):
        names = [name for each in known.values() for name in each]
        assert len(names) == len({*names})
    agents, language = ({name for each in known.values() for name in each} for known in (AGENT_NAMES, LANGUAGE_NAMES))
    assert agents & language == {"step"}  # which is no metric
    assert {f"train/{name}" for name in language} & agents == {"train/entropy_loss", "train/learning_rate"}


def test_the_page_of_files_has_the_names_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    hooks = importlib.import_module("hooks")
    text = hooks.on_page_markdown((DOCS / "reference" / "files.md").read_text(encoding="utf-8"))
    for known in (AGENT_NAMES, LANGUAGE_NAMES):
        rows = [
            f"| `{column}` | {change} | {', '.join(f'`{name}`' for name in names)} |"
            for (column, change), names in known.items()
        ]
        assert "\n".join(["| column | of a logged x | names |", "| --- | --- | --- |", *rows, ""]) in text


PROGRESS = "time/total_timesteps,train/approx_kl,rollout/ep_rew_mean\n"


def write_progress(path: Path, rows: Sequence[tuple[int, float]]) -> Path:
    path.write_text(PROGRESS + "".join(f"{step},{kl},1.0\n" for step, kl in rows), encoding="utf-8")
    return path


def test_steps_that_are_logged_again_replace_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, first = tmp_path / "progress.csv", [(step, 0.01) for step in (128, 256, 384, 512)]
    again = read_logs(write_progress(path, [*first, (128, 0.02), (256, 0.03)])).metrics
    assert again["train/approx_kl"].to_list() == [0.02, 0.03]
    assert "the first 4 rows" in caplog.text
    resumed = read_logs(write_progress(path, [*first, (384, 0.02), (512, 0.03), (640, 0.04)])).metrics
    assert resumed["step"].to_list() == [128, 256, 384, 512, 640]
    assert resumed["train/approx_kl"].to_list() == [0.01, 0.01, 0.02, 0.03, 0.04]
    caplog.clear()
    assert len(read_logs(write_progress(path, first)).metrics) == 4
    assert not caplog.text


def test_events_that_are_logged_again_replace_the_first(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for at, step in enumerate((128, 256, 384, 256, 512)):
            writer.add_scalar("losses/approx_kl", at, step)
            writer.add_scalar("Train/mean_reward/time", at, at)  # of seconds, as rsl_rl counts it
    metrics = read_logs(tmp_path).metrics.drop_nulls("train/approx_kl")
    assert metrics.select("step", "train/approx_kl").rows() == [(128, 0), (256, 3), (512, 4)]


@pytest.mark.parametrize("step", [1e300, float("nan"), -1e300, "x"])
@pytest.mark.parametrize("row", [{"losses/approx_kl": 0.01}, {"kl": 0.01, "length": 5.0, "reward": 1.0}])
def test_steps_that_are_no_number_of_steps(tmp_path: Path, step: Any, row: dict[str, float]) -> None:
    rows = [{"step": each, "response_length": 9.0, **row} for each in (1, 2, step, 3)]
    assert read_logs(log_lines(tmp_path / "log.jsonl", rows)).metrics["round"].to_list() == [1, 2, 3]
    assert "could not be looked at" in outcomes(tmp_path).values()


def test_logs_without_a_step_that_can_be_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"losses/entropy": 0.01}, {"step": 3}]
    assert read_logs(log_lines(tmp_path / "log.jsonl", rows)).axes == 0
    assert set(outcomes(tmp_path).values()) == {"could not be looked at"}


def test_a_deviation_that_is_not_above_zero_has_no_entropy(tmp_path: Path) -> None:
    spread = [1.0, 0.0, -1.0, *np.exp(np.linspace(0.0, -2.75, 40)).tolist()]
    columns = {"Train/mean_reward": [1.0] * 43, "Policy/mean_noise_std": spread}
    metrics = read_logs(log_table(tmp_path, columns)).metrics
    assert metrics["train/entropy_loss"].is_null().to_list() == [False, True, True] + [False] * 40
    assert outcomes(tmp_path)["lost entropy"] == "wrong"


@pytest.mark.parametrize("data", [None, 3, [1], "x"])
def test_a_line_without_data(tmp_path: Path, data: Any) -> None:
    lines = [{"step": 1, "data": VERL}, {"step": 2, "data": data, "actor/entropy": 0.25}, {"step": 3, "data": VERL}]
    metrics = read_logs(log_lines(tmp_path / "metrics.jsonl", lines)).metrics
    assert metrics["train/entropy_loss"].to_list() == [-0.5, -0.25, -0.5]


class Malicious:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def save_pickled(path: Path) -> None:
    np.savez(path, timesteps=[1], results=np.array([Malicious()], dtype=object), allow_pickle=True)


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "progress.csv": lambda path: path.write_text("a,b\n1,2,3,4\n", encoding="utf-8"),
    "other.csv": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "trainer_state.json": lambda path: path.write_text('{"log_history": [{"kl": 1', encoding="utf-8"),
    "metrics.jsonl": lambda path: path.write_text('{"kl": 1}\n[1]\n', encoding="utf-8"),
    "0.monitor.csv": lambda path: path.write_text("r,l,t\n1,2,3\n", encoding="utf-8"),
    "evaluations.npz": save_pickled,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    DAMAGED[name](tmp_path / name)
    with pytest.raises(WhenceError, match=rf"{re.escape(name)} cannot be read as .*Give the file as it was logged"):
        library.inspect(tmp_path)
    assert not Path("ran").exists()


def test_events_that_are_damaged_hold_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "events.out.tfevents.1").write_bytes(b"no events" * 9)
    with pytest.raises(WhenceError, match="holds no numbers: no metric that whence reads"):
        library.inspect(tmp_path)


def test_tensorboard_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(WhenceError, match="pip install tensorboard"):
        library.inspect(tmp_path)


def test_a_supervised_training_is_refused(tmp_path: Path) -> None:
    path = log_state(tmp_path / "trainer_state.json", [{"loss": 1.0, "learning_rate": 1e-4, "entropy": 0.1}] * 3)
    with pytest.raises(WhenceError, match="entropy, learning_rate, loss, step: no metric that whence reads"):
        library.inspect(path)


def test_several_trainings_are_named(small: Path, tmp_path: Path) -> None:
    for name in ("PPO_1", "PPO_2"):
        log_table(tmp_path / name, CLEANRL)
    with pytest.raises(WhenceError, match=r"several logs.*PPO_1, .*PPO_2"):
        library.inspect(tmp_path)
    assert titles(tmp_path / "PPO_2") == []
    log_table(tmp_path / "PPO_2", CLEANRL).joinpath("metrics.csv").rename(tmp_path / "PPO_2" / "second.csv")
    log_table(tmp_path / "PPO_2", CLEANRL)
    with pytest.raises(WhenceError, match=r"several logs.*metrics\.csv, .*second\.csv"):
        library.inspect(tmp_path / "PPO_2")


def test_logs_one_folder_below(tmp_path: Path) -> None:
    log_table(tmp_path / "PPO_1", CLEANRL | {"losses/approx_kl": [1e-6] * 40})
    assert len(titles(tmp_path)) == 1


def test_what_is_neither_a_run_nor_logs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "missing"):
        with pytest.raises(WhenceError, match=r"Logs are read, too: progress\.csv, trainer_state\.json, \*tfevents\*"):
            library.inspect(path)


def test_a_run_that_is_damaged_is_no_folder_of_logs(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, {"env": "CartPole-v1"})
    run.write_round("records", 1, pl.DataFrame({"record_id": [0]}))
    log_table(tmp_path, CLEANRL)
    assert {check.outcome for check in library.inspect(tmp_path)} == {
        "could not be looked at"
    }  # the run, not the table
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(library.RunDirectoryError, match=r"config\.json"):
        library.inspect(tmp_path)


def test_a_checkpoint_with_a_models_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    log_state(tmp_path / "trainer_state.json", [GRPO] * 9)
    assert titles(tmp_path) == []


def test_the_command_names_what_it_does_not_read(small: Path, whence: Any) -> None:
    code, out, _ = whence("findings", small)
    assert code == 0
    assert out.startswith("1. wrong: The policy hardly moves")
    assert "Could not be looked at because logs hold no records: numbers that are not finite, " in out
    assert re.search(r"^   Not read: .*train/policy_gradient_loss", out.splitlines()[-1])
    content = json.loads(whence("findings", small, "--json")[1])
    assert "train/policy_gradient_loss" in content["not_read"]
    assert content["findings"][0]["rank"] == "wrong"
    code, _, error = whence("findings", small.parent / "nothing")
    assert code
    assert "Logs are read, too" in error
