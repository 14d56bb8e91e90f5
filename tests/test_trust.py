"""A run directory is data: what it names runs only for the user's own runs, or with trust."""

import json
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import envpool
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO

from test_safety import EVIL, Evil, rewrite, write_language_run
from whence import IIF, RunDirectory, WhenceError
from whence.core import hide_working_directory
from whence.diagnosis import find_causes, judge_advantages, play_episode
from whence.experiments import configure, load_round, measure_returns, run, workers
from whence.experiments.llm.language_rebuilding import list_policies, load_trained_task, rebuild_round
from whence.page import ExploredRun, write_report
from whence.page.explored_rounds import build_detail, build_round
from whence.runs import SIGNATURE, signatures
from whence.sb3 import InfluenceCallback, resume
from whence.sb3.base.model_description import to_json_types
from whence.sb3.base.stored_spaces import describe_space, make_space

STARTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system"}
SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 1}


class Watch(list):
    """The code of a folder that ran, the processes that began, and the environments that were made."""

    folder = None

    def __call__(self, event, arguments):
        file = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
        if self.folder and (event in STARTS or file.startswith(self.folder)):
            self.append((event, file or arguments))


WATCH = Watch()
sys.addaudithook(WATCH)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Watch a test, in which modules are found next to the runs, as with PYTHONPATH or `python -m` there."""
    for folder in ("own", "stage"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    make = gym.make
    monkeypatch.setattr(gym, "make", lambda name, **options: WATCH.append(("made", name)) or make(name, **options))
    monkeypatch.setattr(envpool, "make", lambda name, **options: WATCH.append(("made", name)) or int("no pool"))
    monkeypatch.setattr(WATCH, "folder", str(tmp_path))
    gym.register("Evil-v0", entry_point="evil:Env")
    WATCH.clear()
    yield WATCH
    gym.registry.pop("Evil-v0")
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("trust")
    settings = {"hyperparameters": SMALL, "policy_kwargs": {"net_arch": [8]}, "eval_episodes": 0, "rounds": 2}
    run(configure(arm="iif", env="FrozenLake-v1", **settings), path / "agent", recordings=[2])
    model = PPO("MlpPolicy", gym.make("CartPole-v1"), **SMALL, seed=0, device="cpu")
    model.learn(64, callback=InfluenceCallback(IIF(0.5), run=path / "script"))
    write_language_run(path / "language")
    return path


@pytest.fixture
def stage(base, tmp_path, monkeypatch):
    """Runs as they come from someone else, with a module next to them and in each."""
    shutil.copytree(base, tmp_path / "stage")
    for folder in ("", "agent", "script", "language"):
        (tmp_path / "stage" / folder / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    monkeypatch.chdir(tmp_path / "stage")
    return tmp_path / "stage"


def change(**settings):
    """Return an attack that changes a configuration, and the settings of the command in it."""

    def edit(document):
        if "experiment" in document["config"] and "experiment" not in settings:
            document["config"]["experiment"] |= settings
        document["config"] |= settings

    return lambda path: rewrite(path / "config.json", edit)


def sign_elsewhere(path):
    """Return a run of the user's own, whose environment is of a module that a stranger's run brings, too."""
    own = shutil.copytree(path, path.parent.parent / "own" / path.name)
    change(env="evil:Lake-v1", env_kwargs={})(own)
    RunDirectory.open(own).sign()
    assert RunDirectory.open(own).is_trusted
    return own


def copy_signature(path):
    own = sign_elsewhere(path)
    for name in (SIGNATURE, "config.json"):
        shutil.copy(own / name, path)


def link_signature(path):
    own = sign_elsewhere(path)
    for name in (SIGNATURE, "config.json"):
        (path / name).unlink()
        (path / name).symlink_to(own / name)


def replace_weights(path):
    for file in path.glob("policies/*"):
        file.write_bytes(pickle.dumps(Evil(str(path.parent.parent / "marker"))))


POOL = {"collect_with": "envpool", "evaluate_with": "envpool", "env": "Basic-v1", "env_kwargs": {}}
LANGUAGE = {"arm": "iif", "seed": 0, "task": None, "model": ".", "dataset": "evil.jsonl", "test_dataset": "evil.jsonl"}
NAMED = {
    "a program as EnvPool's VizDoom": ("agent", change(**POOL, pool_kwargs={"vzd_path": "/proc/self/cwd/evil.sh"})),
    "a file of EnvPool's": ("agent", change(evaluate_with="envpool", pool_kwargs={"base_path": "."})),
    "highway-env": ("script", change(env="highway-v0", env_kwargs={"config": {"other_vehicles_type": "evil.Car"}})),
    "a module beside the run": ("agent", change(env="evil:Lake-v1", env_kwargs={})),
    "a module in the run": ("script", change(env="script.evil:Lake-v1", env_kwargs={})),
    "a module of Python's": ("script", change(env="this:Lake-v1")),
    "what this process registered": ("script", change(env="Evil-v0", env_kwargs={})),
    "a copied signature": ("script", copy_signature),
    "a linked signature": ("script", link_signature),
}
ATTACKS = NAMED | {
    "a policy": ("script", change(policy="evil.Policy")),
    "an algorithm": ("script", change(algorithm="evil.PPO")),
    "an extractor": ("script", change(policy_kwargs={"features_extractor_class": "evil.Extractor"})),
    "an optimiser": ("script", change(optimizer="evil.Adam", policy_kwargs={"optimizer_class": "evil.Adam"})),
    "an activation": ("script", change(policy_kwargs={"activation_fn": "evil.reward"})),
    "a rule": ("script", change(rule="evil.Rule()", target="evil.Target()", objective="evil.Objective()")),
    "a space": ("script", change(observation_space={"type": "evil.Space"})),
    "a pickle": ("script", replace_weights),
    "a reward": ("language", change(experiment=LANGUAGE | {"reward": "evil.py:reward", "test_reward": "evil:reward"})),
    "a trainer": (
        "language",
        change(experiment=LANGUAGE | {"reward": "evil:reward", "settings": {"deepspeed": "evil"}}),
    ),
}


def look(directory, page=None):
    """Look at a run in every way, and write its page; return what was refused."""
    explored, refusals = ExploredRun(directory), []
    first = directory.round("records", 2)["record_id"][0]
    pages = [lambda: build_round(explored, 2), lambda: build_detail(explored, 2, first)]
    pages += [lambda: write_report(explored, page)] if page else []
    agent = [
        lambda: load_round(directory, 2),
        lambda: explored.measure(2, first, 2),
        lambda: judge_advantages(directory, 2, measure="rollouts", continuations=2),
        lambda: play_episode(directory),
        lambda: find_causes(directory, target_states=0, actions=0),
        lambda: measure_returns(directory, load_round(directory, 2)[0], episodes=2, seed=0).__enter__(),
    ]
    language = [lambda way=way: way(directory) for way in (list_policies, load_trained_task)]
    for way in pages + ([*language, lambda: rebuild_round(directory, 1)] if directory.is_language else agent):
        try:
            way()
        except WhenceError as refusal:
            refusals.append(str(refusal))
    return refusals


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_runs_that_a_strangers_run_names(attack, stage, watch, tmp_path):
    name, apply = ATTACKS[attack]
    apply(stage / name)
    sys.modules.pop("this", None)
    watch.clear()
    refusals = look(RunDirectory.open(stage / name), tmp_path / "page.html" if attack in NAMED else None)
    assert (list(watch), (tmp_path / "marker").exists(), "this" in sys.modules) == ([], False, False)
    assert refusals
    if attack in NAMED:
        assert any("is not signed as a run that you made" in refusal and "--trust" in refusal for refusal in refusals)
        shown = build_round(ExploredRun(stage / name), 2)
        assert shown["scored"]
        assert shown["changed"]
        assert "is not signed as a run that you made" in (tmp_path / "page.html").read_text()
        look(RunDirectory.open(stage / name, trust=True))
        assert watch  # it would have run


COMMANDS = {
    **{"attribute": 0, "phases --record 40": 0, "report": 0, "why --record 40": 0, "diagnose --measure visits": 0},
    **{
        "show": 0,
        "why": 2,
        "diagnose --measure rollouts": 2,
        "counterfactual --round 2 --subsets 3 --test-episodes 2": 2,
    },
}


@pytest.mark.parametrize(("words", "code"), COMMANDS.items())
def test_commands_show_what_needs_no_environment_and_say_so(words, code, stage, watch, whence):
    change(env="evil:Lake-v1", env_kwargs={})(stage / "agent")
    command, *options = words.split()
    ended, out, err = whence(command, "agent", *options)
    assert (ended, list(watch)) == (code, [])
    assert ("is not signed as a run that you made" in out + err) == (code == 2 or command == "show")
    whence(command, "agent", *options, "--trust")
    assert bool(watch) == (code == 2 or command in ("show", "report"))


def test_own_runs_are_signed_where_they_are(base, tmp_path, monkeypatch):
    assert RunDirectory.open(base / "script").is_trusted
    (tmp_path / "link").symlink_to(base / "script")
    assert RunDirectory.open(tmp_path / "link").is_trusted
    moved = shutil.copytree(base / "script", tmp_path / "moved")
    stranger = RunDirectory.open(moved)
    stranger.note(seen=True)
    assert not RunDirectory.open(moved).is_trusted
    resume(moved, gym.make("CartPole-v1"))
    assert not RunDirectory.open(moved).is_trusted  # its configuration is still the stranger's
    RunDirectory.resume(moved, stranger.config, rounds=1)
    assert RunDirectory.open(moved).is_trusted
    resume(moved, gym.make("CartPole-v1"))
    assert RunDirectory.open(moved).is_trusted
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other user"))
    assert not RunDirectory.open(moved).is_trusted


def test_processes_that_begin_at_once_make_one_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: signatures._read_key(is_needed=True), range(8)))
    assert keys == {(tmp_path / "whence" / "key").read_bytes()}
    assert (tmp_path / "whence" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fault", ["no home", "others may read", "damaged"])
def test_without_a_key_runs_are_unsigned_which_is_said_once(fault, tmp_path, monkeypatch, caplog):
    home = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    RunDirectory.create(tmp_path / "before", {}).release()
    key = home / "whence" / "key"
    if fault == "no home":
        monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    elif fault == "others may read":
        key.chmod(0o644)
    else:
        key.write_bytes(b"short")
    for name in ("run", "another"):
        RunDirectory.create(tmp_path / name, {}).release()
        assert not RunDirectory.open(tmp_path / name).is_trusted
    assert not RunDirectory.open(tmp_path / "before").is_trusted
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_process_imports_nothing_from_the_working_directory(stage, monkeypatch):
    imports = [sys.executable, "-c", "import evil"]  # as multiprocessing starts its own
    with hide_working_directory():
        assert subprocess.run(imports, cwd=stage, capture_output=True, check=False).returncode == 1
    assert subprocess.run(imports, cwd=stage, check=False).returncode == 0
    assert workers._start.__wrapped__


@pytest.mark.parametrize(
    "space",
    [
        *(
            spaces.Discrete(3, start=-1),
            spaces.MultiDiscrete([2, 3]),
            spaces.MultiBinary(3),
            spaces.MultiBinary([2, 3]),
        ),
        *(
            spaces.Box(0, 255, (3, 8, 8), np.uint8),
            spaces.Box(np.array([-np.inf, 0.1], "f"), np.array([np.inf, 0.3], "f")),
        ),
        spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(-1, 1, (2,)))]),
    ],
    ids=str,
)
def test_spaces_come_back_from_json_in_their_order(space):
    again = make_space(json.loads(json.dumps(to_json_types(describe_space(space)))))
    assert again == space
    assert again.dtype == space.dtype
    assert list(getattr(again, "spaces", ())) == list(getattr(space, "spaces", ()))
