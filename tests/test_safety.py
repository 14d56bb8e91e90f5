"""Nothing that is read runs code, leaves its directory, or is more than text on a page or in a terminal."""

import ast
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import envpool
import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import run_audit
from helpers.toys import rewrite
from run_audit import judge
from whence import IIF, Action, RoundRecording, RunDirectory, WhenceError, cli
from whence.causes import find_causes, play_episode
from whence.cli.terminal import console, make_table
from whence.core import RunDirectoryError, describe, hide_working_directory, write_atomically
from whence.lab import load_comparison
from whence.lab.agents import configure, run
from whence.page import ExploredRun, write_report
from whence.page.content.rounds import build_detail, build_round
from whence.page.questions import Questions
from whence.page.server import make_app
from whence.runs import SIGNATURE, Checkpoint, config_file
from whence.sb3 import InfluenceCallback, resume
from whence.sb3.models.descriptions import describe_space, make_space
from whence.stored.agents import load_round, measure_returns
from whence.stored.agents.rounds import load_agent
from whence.stored.language.policies import list_policies, load_trained_task
from whence.stored.language.rounds import rebuild_round
from whence.stored.language.tasks import load_language_model, load_pretrained

SOURCES = Path(__file__).parent.parent / "src" / "whence"

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml", "code", "runpy"}
"""Modules that run what they read, or that read objects of any class."""

CALLS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "np.fromfile", "torch.package"),
    *("eval", "exec", "compile", "os.system", "os.popen", "__import__", "pl.DataFrame.deserialize"),
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output"),
}

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("code of a file ran")
def reward(prompts, responses):
    return [0.0] * len(responses)
"""

ESCAPES = "\x1b]8;;http://example.invalid\x1b\\here\x1b]8;;\x1b\\ \x1b[2J\x07 [link=http://example.invalid]there[/link]"
MARKUP = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small runs of every kind."""
    path = tmp_path_factory.mktemp("safety") / "base"
    settings = {"hyperparameters": {"n_steps": 32, "batch_size": 32, "n_epochs": 1}, "policy_kwargs": {"net_arch": [8]}}
    config = configure(arm="iif", env="FrozenLake-v1", rounds=2, eval_episodes=2, **settings)
    run(config, path / "agent", lambda *done: None, recordings=[2])
    (path / "comparison").mkdir()
    (path / "comparison" / "comparison.json").write_text(json.dumps([config.to_json()]), encoding="utf-8")
    (path / "comparison" / "summary.json").write_text(json.dumps({"FrozenLake-v1": {}}), encoding="utf-8")
    toy = PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    toy.learn(64, callback=InfluenceCallback(IIF(0.5), run=path / "script"))
    write_language_run(path / "language")
    (path / "prompts.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 4, encoding="utf-8")
    return path


def begin_after(path: Path, config: Any, number: int) -> RunDirectory:
    """Continue a run after a round."""
    return RunDirectory.begin(path, config, start=Checkpoint(number, {}, path), overwrite=True)


def write_language_run(path: Path) -> None:
    experiment = {"arm": "iif", "seed": 0, "task": "arithmetic", "size": "tiny"}
    config = {"kind": "language", "arm": "iif", "seed": 0, "rounds": 2, "experiment": experiment}
    directory = RunDirectory.create(path, config, versions={"torch": torch.__version__})
    for number in (0, 1, 2):
        answers: dict[str, Any] = {"prompt": [f"{row} + 1 =" for row in range(4)], "response": [" 1"] * 4}
        directory.write_round("answers", number, pl.DataFrame(answers | {"reward": [0.0, 1.0, 0.5, 0.0]}))
    for number in (1, 2):
        table: dict[str, Any] = {
            "record_id": [4 * number + row for row in range(4)],
            **answers,
            **{"reward": [0.0, 1.0, 0.5, 0.0], "tokens": [2] * 4, "ended": [True] * 4, "log_prob": [-1.0] * 4},
            **{"divergence": [0.0, 0.1, 0.2, 0.3], "advantage": [1.0, -1.0, 0.5, 0.0]},
            **{"prompt_ids": [[1, 2, 3]] * 4, "response_ids": [[4, 5]] * 4},
            **{"score": [0.25, -0.25, 0.5, -0.5], "keep": [True, False, True, False], "weight": [1.0, 0.0, 1.0, 0.0]},
            "reason": [None, "below 0", None, "below 0"],
        }
        directory.write_round("records", number, pl.DataFrame(table))
        metrics = {"reward": 0.4, "kept": 2, "records": 4, "negative_share": 0.5, "kl_coef": 0.1}
        directory.append("metrics", {"round": number, **metrics})
        directory.append("timings", {"round": number, "collection_cpu": 1.0, "optimisation_cpu": 1.0})


@pytest.fixture
def stage(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them to change."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return shutil.copytree(base, tmp_path / "stage")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that evil code writes; it must not be there at the end of a test."""
    return tmp_path / "marker"


class TestSources:
    @pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCES)))
    def test_no_module_reads_objects_or_runs_text(self, file: Path) -> None:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not {name.name.split(".")[0] for name in node.names} & MODULES
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                # NumPy's reader refuses objects where it is told so in the call.
                assert name not in CALLS or (name == "np.load" and "allow_pickle=False" in ast.unparse(node))
                for word in node.keywords:
                    if word.arg in ("trust_remote_code", "weights_only", "shell", "allow_pickle"):
                        assert ast.unparse(word.value) == ("True" if word.arg == "weights_only" else "False")
                if re.match(r"(pl|polars)\.(read|scan)_", name):
                    assert not re.search(r"https?:|s3:|hf:|gs:", ast.unparse(node))
                if name.endswith(".from_pretrained") and "AutoModel" in name:
                    assert "use_safetensors=True" in ast.unparse(node)

    def test_the_page_makes_no_markup_of_data(self) -> None:
        scripts = [*SOURCES.rglob("*.js"), *SOURCES.rglob("*.html")]
        assert len(scripts) > 5
        for file in (script for script in scripts if "vendor" not in script.parts):
            assert not re.search(
                r"\b(inner|outer)HTML\b|insertAdjacentHTML|document\.write|\beval\(|new Function|ContextualFragment",
                file.read_text(encoding="utf-8"),
            )


def test_a_run_is_read_without_pickle(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an object was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (np, "load")):
        monkeypatch.setattr(owner, name, refuse)
    load_agent(RunDirectory.open(stage / "agent"), 2)
    RoundRecording.load(RunDirectory.open(stage / "agent").round_path("recordings", 2))
    for name in ("agent", "script", "language"):
        write_report(RunDirectory.open(stage / name), stage / "page.html")


class Watch(list[Any]):
    """The code of a folder that ran, the processes that began, and the environments that were made."""

    folder = ""
    starts = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system")

    def __call__(self, event: str, arguments: Any) -> None:
        file = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
        if self.folder and (event in self.starts or file.startswith(self.folder)):
            self.append((event, file or arguments))


WATCH = Watch()
sys.addaudithook(WATCH)


@pytest.fixture
def watch(stage: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watch a test in the folder of strangers' runs, in which modules are found, as with PYTHONPATH or `python -m`."""
    for folder in ("", "agent", "script", "language"):
        (stage / folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.chdir(stage)
    monkeypatch.syspath_prepend(str(stage))
    make, spec = gym.make, gym.spec
    monkeypatch.setattr(gym, "spec", lambda name: WATCH.append(("looked up", name)) or spec(name))
    monkeypatch.setattr(gym, "make", lambda name, **options: WATCH.append(("made", name)) or make(name, **options))
    monkeypatch.setattr(envpool, "make", lambda name, **options: WATCH.append(("made", name)) or int("no pool"))
    monkeypatch.setattr(WATCH, "folder", str(stage))
    gym.register("Evil-v0", entry_point="evil:Env")
    WATCH.clear()
    yield WATCH
    gym.registry.pop("Evil-v0")
    for name in [name for name, module in sys.modules.items() if str(stage) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def change(**settings: Any) -> Any:
    """Return an attack that changes a configuration, and the settings of the command in it."""

    def edit(document: Any) -> None:
        if "experiment" in document["config"] and "experiment" not in settings:
            document["config"]["experiment"] |= settings
        document["config"] |= settings

    return lambda path: rewrite(path / "config.json", edit)


def take_signature(put: Any) -> Any:
    """Return an attack with the signed configuration of a run of the user's own, which names a module."""

    def attack(path: Path) -> None:
        own = shutil.copytree(path, path.parent.parent / "own")
        change(env="evil:Lake-v1", env_kwargs={})(own)
        RunDirectory.open(own).sign()
        assert RunDirectory.open(own).is_trusted
        for name in (SIGNATURE, "config.json"):
            (path / name).unlink()
            put(own / name, path / name)

    return attack


def replace_weights(path: Path) -> None:
    for file in path.glob("policies/*"):
        file.write_bytes(pickle.dumps(Evil(str(path.parent.parent / "marker"))))


POOL = {"collect_with": "envpool", "evaluate_with": "envpool", "env": "Basic-v1", "env_kwargs": {}}
HIGHWAY = {"config": {"other_vehicles_type": "evil.Car"}}
LANGUAGE = {"arm": "iif", "seed": 0, "task": None, "model": ".", "dataset": "evil.jsonl", "test_dataset": "evil.jsonl"}
NAMED = {
    "a program as EnvPool's VizDoom": ("agent", change(**POOL, pool_kwargs={"vzd_path": "/proc/self/cwd/evil.sh"})),
    "a file of EnvPool's": ("agent", change(evaluate_with="envpool", pool_kwargs={"base_path": "."})),
    "highway-env": ("script", change(env="highway-v0", env_kwargs=HIGHWAY, env_wrappers=[])),
    "a class beside the run": ("script", change(env_wrappers=[{"class": "evil:Env", "kwargs": {}}])),
    "a module beside the run": ("agent", change(env="evil:Lake-v1", env_kwargs={})),
    "a module in the run": ("script", change(env="script.evil:Lake-v1", env_kwargs={})),
    "a module of Python's": ("script", change(env="this:Lake-v1")),
    "what this process registered": ("script", change(env="Evil-v0", env_kwargs={}, env_wrappers=[])),
    "a copied signature": ("script", take_signature(shutil.copy)),
    "a linked signature": ("script", take_signature(lambda own, path: path.symlink_to(own))),
}
ATTACKS = NAMED | {
    "a policy": ("script", change(policy="evil.Policy")),
    "an algorithm": ("script", change(algorithm="evil.PPO")),
    "an extractor": ("script", change(policy_kwargs={"features_extractor_class": "evil.Extractor"})),
    "an optimiser": ("script", change(optimizer="evil.Adam", policy_kwargs={"optimizer_class": "evil.Adam"})),
    "a rule and a wrapper": ("script", change(rule="evil.Rule()", target="evil.T()", vec_wrappers=["evil.Wrapper"])),
    "a space": ("script", change(observation_space={"type": "evil.Space"})),
    "a pickle": ("script", replace_weights),
    "a reward": ("language", change(experiment=LANGUAGE | {"reward": "evil.py:reward", "test_reward": "evil:reward"})),
    "a trainer": ("language", change(experiment=LANGUAGE | {"reward": "evil:r", "settings": {"deepspeed": "evil"}})),
}


def measure(directory: RunDirectory) -> None:
    with measure_returns(directory, load_round(directory, 2)[0], 2, episodes=2, seed=0) as evaluate:
        evaluate({}, 0)


def look(directory: RunDirectory, page: Path | None = None) -> list[str]:
    """Look at a run in every way, and write its page; return what was refused."""
    explored, refusals = ExploredRun(directory), []
    first = directory.round("records", 2)["record_id"][0]
    ways: list[Any] = [lambda: build_round(explored, 2), lambda: build_detail(explored, 2, first)]
    if page is not None:
        ways.append(lambda: write_report(explored, page))
    if directory.is_language:
        ways += [lambda way=way: way(directory) for way in (list_policies, load_trained_task)]
        ways.append(lambda: rebuild_round(directory, 1))
    else:
        ways += [
            lambda: load_round(directory, 2),
            lambda: explored.measure(2, first, 2),
            lambda: play_episode(directory),
            lambda: find_causes(directory, Action(0, 0)),
            lambda: measure(directory),
        ]
    for way in ways:
        try:
            way()
        except WhenceError as refusal:
            refusals.append(str(refusal))
    return refusals


UNSIGNED = "is not signed as a run that you made"
ON_PAGES = ("a file of EnvPool's", "a class beside the run", "a copied signature")
"""Attacks on runs of which a page is written, which takes as long as all else."""


class TestRunsOfStrangers:
    @pytest.mark.parametrize("attack", ATTACKS)
    def test_nothing_runs_that_one_names(self, attack: str, stage: Path, watch: Watch, marker: Path) -> None:
        name, apply = ATTACKS[attack]
        apply(stage / name)
        sys.modules.pop("this", None)
        watch.clear()
        page = marker.with_name("page.html") if attack in ON_PAGES else None
        refusals = look(RunDirectory.open(stage / name), page)
        assert (list(watch), marker.exists(), "this" in sys.modules) == ([], False, False)
        assert refusals
        if attack in NAMED:
            assert any(UNSIGNED in refusal and "--trust" in refusal for refusal in refusals)
            assert page is None or UNSIGNED in page.read_text()
            explored = ExploredRun(stage / name)
            assert build_round(explored, 2)["scored"]
            assert not isinstance(explored.changes(2), str)
            look(RunDirectory.open(stage / name, trust=True))
            assert watch or marker.exists() or "this" in sys.modules  # it would have run

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            *((words, 0) for words in ("attribute", "report", "why --record 40", "show")),
            *(("why", 2), ("prove --record 40 --top 8 --test-episodes 2", 2)),
        ],
    )
    def test_commands_show_what_needs_no_environment(
        self, words: str, code: int, stage: Path, watch: Watch, whence: Any
    ) -> None:
        change(env="evil:Lake-v1", env_kwargs={})(stage / "agent")
        command, *options = words.split()
        ended, out, err = whence(command, "agent", *options)
        assert (ended, list(watch)) == (code, [])
        assert (UNSIGNED in " ".join((out + err).split())) == (code == 2 or command == "show")
        whence(command, "agent", *options, "--trust")
        assert bool(watch) == (code == 2 or command in ("show", "report"))

    def test_own_runs_are_signed_where_they_are(
        self, base: Path, stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def is_trusted(path: Path) -> bool:
            return RunDirectory.open(path).is_trusted

        moved = stage / "script"
        (tmp_path / "link").symlink_to(base / "script")
        assert (is_trusted(base / "script"), is_trusted(tmp_path / "link"), is_trusted(moved)) == (True, True, False)
        stranger = RunDirectory.open(moved)
        stranger.note(seen=True)
        model, callback = resume(moved, gym.make("CartPole-v1"))
        model.learn(96, callback=callback)
        assert (RunDirectory.open(moved).rounds(), is_trusted(moved)) == ([1, 2, 3], False)
        begin_after(moved, stranger.config, 1).prepare_writing()
        assert not is_trusted(moved)
        RunDirectory.open(moved).sign()
        assert is_trusted(moved)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other user"))
        assert not is_trusted(moved)

    def test_processes_that_begin_at_once_make_one_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        with ThreadPoolExecutor(8) as pool:
            keys = set(pool.map(lambda _: config_file._read_key(is_needed=True), range(8)))
        file = tmp_path / "whence" / "key"
        assert (keys, file.stat().st_mode & 0o777) == ({file.read_bytes()}, 0o600)

    @pytest.mark.parametrize("fault", ["no home", "others may read", "damaged"])
    def test_without_a_key_runs_are_unsigned_which_is_said_once(
        self, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        RunDirectory.create(tmp_path / "before", {}).release()
        key = tmp_path / "state" / "whence" / "key"
        if fault == "no home":
            monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
        elif fault == "others may read":
            key.chmod(0o644)
        else:
            key.write_bytes(b"short")
        for name in ("run", "another"):
            RunDirectory.create(tmp_path / name, {}).release()
        assert not any(RunDirectory.open(tmp_path / name).is_trusted for name in ("before", "run", "another"))
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_a_process_imports_nothing_from_the_working_directory(self, watch: Watch) -> None:
        imports = [sys.executable, "-c", "import evil"]  # as multiprocessing starts its own
        with hide_working_directory():
            assert subprocess.run(imports, capture_output=True, check=False).returncode == 1
        assert subprocess.run(imports, check=False).returncode == 0

    @pytest.mark.parametrize(
        "space",
        [
            *(spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)),
            *(spaces.MultiBinary([2, 3]), spaces.Box(0, 255, (3, 8, 8), np.uint8)),
            spaces.Box(np.array([-np.inf, 0.1], "f"), np.array([np.inf, 0.3], "f")),
            spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(-1, 1, (2,)))]),
        ],
        ids=str,
    )
    def test_spaces_come_back_from_json_in_their_order(self, space: Any) -> None:
        again: Any = make_space(json.loads(json.dumps(describe(describe_space(space)))))
        assert (again, again.dtype) == (space, space.dtype)
        assert list(getattr(again, "spaces", ())) == list(getattr(space, "spaces", ()))


class TestLanguageModels:
    def test_code_that_comes_with_a_model_is_not_run(self, marker: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        classes = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B", "AutoTokenizer": ["evil.C", None]}
        (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}), encoding="utf-8")
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)), encoding="utf-8")
        for kind in (AutoModelForCausalLM, AutoTokenizer):
            with pytest.raises(WhenceError, match="no code that comes with a model"):
                load_pretrained(kind, str(folder))
        assert not marker.exists()

    def test_pickled_weights_are_refused_in_words(self, marker: Path, tmp_path: Path) -> None:
        settings = GPT2Config(n_layer=1, n_embd=4, n_head=1, n_positions=4, vocab_size=5)
        GPT2LMHeadModel(settings).save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "model.safetensors").unlink()
        (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(marker))))
        with pytest.raises(WhenceError, match=r"safetensors alone.*save_pretrained"):
            load_language_model(str(tmp_path / "model"), "float32")
        assert not marker.exists()


class Evil:
    """What writes the marker when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (Path(self.marker), "unpickled")


class TestDirectories:
    def test_nothing_is_written_or_deleted_through_a_link(self, stage: Path, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        (stage / "agent" / "records").rename(precious)
        (stage / "agent" / "records").symlink_to(precious)
        before = {file.name: file.read_bytes() for file in precious.iterdir()}
        run = RunDirectory.open(stage / "agent")
        for begin in (RunDirectory.create, lambda path, config: begin_after(path, config, 0)):
            with pytest.raises(RunDirectoryError, match=r"records is a link to .*precious"):
                begin(run.path, run.config)
        assert run.rounds() == [1, 2]  # and it can be read
        assert {file.name: file.read_bytes() for file in precious.iterdir()} == before

    def test_a_link_in_place_of_a_temporary_file_is_not_followed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.getpid", lambda: 7)
        (tmp_path / "precious").write_text("mine")
        (tmp_path / ".metrics.7.tmp").symlink_to(tmp_path / "precious")
        with write_atomically(tmp_path / "metrics") as temporary:
            temporary.write_text("new")
        assert (tmp_path / "precious").read_text() == "mine"
        assert (tmp_path / "metrics").read_text() == "new"

    def test_a_link_to_a_run_is_a_run(self, stage: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(stage / "agent")
        run = RunDirectory.open(tmp_path / "link")
        begin_after(run.path, run.config, 1).prepare_writing()
        assert run.rounds() == [1]

    @pytest.mark.parametrize("arm", ["../../../elsewhere", "/elsewhere", "iif/../../.."])
    def test_no_name_in_a_file_leads_out_of_a_comparison(self, stage: Path, arm: str) -> None:
        rewrite(stage / "comparison" / "comparison.json", lambda configs: configs[0].update(arm=arm))
        with pytest.raises(WhenceError, match="is no such file of a comparison"):
            load_comparison(stage / "comparison")

    def test_names_of_tensors_are_no_paths(self, stage: Path, tmp_path: Path) -> None:
        run = RunDirectory.open(stage / "agent")
        run.write_policy(9, {"../../../escaped": torch.zeros(1), "/escaped": torch.zeros(1)})
        assert set(run.policy(9)) == {"../../../escaped", "/escaped"}
        with pytest.raises(RunDirectoryError, match=r"does not fit.*\.\./escaped"):
            load_agent(run, 9)
        assert not list(stage.rglob("escaped*"))


class Elements(HTMLParser):
    """Counts elements, and keeps attributes that run code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def poison(run: RunDirectory, text: str) -> None:
    """Put a text wherever a run's files hold text."""
    rewrite(
        run.path / "config.json",
        lambda document: document.update(
            config={**document["config"], "rule": text, text: text, "hyperparameters": {text: text}},
            versions={text: text},
        ),
    )
    run.append("metrics", {"round": 3, text: text, f"train/{text}": 1.0})
    for table in ("records", "answers"):
        for number in (1, 2):
            if run.round_path(table, number).exists():  # type: ignore[arg-type]
                rows = run.round(table, number)  # type: ignore[arg-type]
                names = [name for name in ("reason", "prompt", "response") if name in rows.columns]
                run.write_round(table, number, rows.with_columns(pl.lit(text).alias(name) for name in names))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["script", "language"])
def test_a_page_shows_text_as_text(stage: Path, tmp_path: Path, name: str) -> None:
    pages = {}
    for text in ("plain", MARKUP):
        poison(RunDirectory.open(stage / name), text)
        write_report(RunDirectory.open(stage / name), tmp_path / "page.html")
        app = make_app([ExploredRun(stage / name)], Questions(), Questions(), Questions())
        served = TestClient(app, base_url="http://127.0.0.1:8000").get("/").text
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert ('<section id="answers">' in page) == (name == "language")
        pages[text] = [Elements(page), Elements(served)]
        assert MARKUP not in page + served
    for plain, marked in zip(*pages.values(), strict=True):
        assert marked.count.get("script") == plain.count.get("script")
        assert marked.count.get("img") == plain.count.get("img")
        assert not marked.handlers


@pytest.mark.parametrize(
    "arguments",
    [
        *(["show", "language"], ["show", "language", "--bottom", "2"], ["show", "script", "--top", "2"]),
        *(["llm", "why", "language", "--round", "1"], ["show", "absent" + ESCAPES], ["llm", ESCAPES]),
        *(["train", ESCAPES], ["why", "script", "--by", ESCAPES], ["attribute", "script", "--env", ESCAPES]),
        ["train", "CartPole-v1", "--device", ESCAPES],
    ],
    ids=lambda words: " ".join(words[:2]).split("\x1b")[0],
)
def test_the_terminal_gets_text_alone(
    stage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name in ("script", "language"):
        poison(RunDirectory.open(stage / name), ESCAPES)
    path = [str(stage / word) if word in ("script", "language") else word for word in arguments]
    monkeypatch.setattr(sys, "argv", ["whence", *path])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, 2)
    out, err = capsys.readouterr()
    assert out + err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    assert "there" not in out + err or "[link=" in out + err  # Rich's markup is text, too


def test_headings_of_a_table_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.print(make_table("", [ESCAPES], []), width=400)
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "[link=http://example.invalid]there[/link]" in out


class TestAudit:
    def test_a_known_vulnerability_ends_with_an_error(self) -> None:
        hole = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
        packages = [{"name": "a", "version": "1.0", "vulns": [hole]}, {"name": "b", "version": "1", "vulns": []}]
        code, lines = judge(packages)
        assert code == 1
        assert lines == ["a 1.0: PYSEC-1, fixed in 2.0", "pip-audit: 1 known vulnerabilities in 2 packages."]
        assert judge(packages[1:]) == (0, ["pip-audit: 0 known vulnerabilities in 1 packages."])

    def test_what_cannot_be_asked_is_not_run_and_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code, lines = judge([{"name": "a", "skip_reason": "not found"}])
        assert code == 0
        assert "not run: none of 1 packages could be looked up (not found)" in lines[0]

        def hang() -> Any:
            raise run_audit.subprocess.TimeoutExpired("pip-audit", 20)

        monkeypatch.setattr(run_audit.importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(run_audit, "run_audit", hang)
        assert run_audit.main() == 0
