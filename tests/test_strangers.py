"""Every command, with every part that a user may supply, on runs of strangers, of which nothing runs or is believed."""

import functools
import itertools
import json
import os
import shutil
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import envpool
import gymnasium as gym
import polars as pl
import pytest
from stable_baselines3 import PPO
from starlette.testclient import TestClient

from helpers.language_training import make_model, make_tokenizer
from helpers.toys import rewrite, sign_runs
from whence import IIF, RunDirectory, WhenceError
from whence.causes import retraining
from whence.cli.app import COMMANDS, LLM_COMMANDS, load_command
from whence.cli.terminal.options import AGENTS
from whence.cli.terminal.options import LANGUAGE as LANGUAGE_MODELS
from whence.core import write_json
from whence.lab.agents import configure, run
from whence.lab.agents.training import read_curve
from whence.lab.efficiency import summarise
from whence.llm.rollout_files import list_files
from whence.page.server import make_app
from whence.runs import load_tree, read_digests, save_tree, write_flag
from whence.sb3 import InfluenceCallback, resume
from whence.stored.language import LanguageConfig, describe, load_checkpoint, load_start_policy

SOURCES = Path(__file__).parent.parent / "src" / "whence"

CODE = """
import gymnasium, stable_baselines3
from stable_baselines3.common.torch_layers import FlattenExtractor
class Policy(stable_baselines3.ppo.MlpPolicy): pass
class Extractor(FlattenExtractor): pass
def Env(*args, **kwargs): return gymnasium.make("FrozenLake-v1")
def reward(prompts, responses): return [float(len(text)) for text in responses]
"""
"""Parts that would do, in the module `evil` of strangers, and in the user's own module `mine`."""

LANGUAGE = {
    **{"arm": "iif", "seed": 0, "task": None, "model": "evil/model", "dataset": "evil/data.jsonl", "size": "tiny"},
    **{"reward": "evil/evil.py:reward", "test_dataset": "evil/data.jsonl", "test_reward": "evil:reward"},
    **{"demonstrations": "evil/data.jsonl", "settings": {"rounds": 2}},
}
SCORED = {
    **{"algorithm": "scored", "model": "evil/model", "reference": "evil/model", "demonstrations": "evil/data.jsonl"},
    **{"target_kind": "validation", "beta": 0.1, "dtype": "float32", "batch_size": 4, "temperature": 1.0},
}
SCRIPT = {
    **{"algorithm": "grpo", "trl": {"steps_per_generation": 1, "gradient_accumulation_steps": 1}},
    **{"model": "evil/model", "weights": None, "output_dir": "../evil", "parameters": 9, "trained_parameters": 9},
}
CLASSES = {"features_extractor_class": "evil.Extractor", "optimizer_class": "evil.Adam"}
POOL = {"collect_with": "envpool", "evaluate_with": "envpool", "pool_kwargs": {"base_path": "evil"}}

ALL = {"rule": "ScoreAll"}  # a training on a selection is not continued with other seeds

HOSTILE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "an environment": ("agent", {"env": "evil:Env", "env_kwargs": {}, "rule": ALL}),
    "a pool": ("agent", {**POOL, "rule": ALL}),
    "wrappers": ("script", {"env_wrappers": [{"class": "evil:Env", "kwargs": {}}], "rule": ALL}),
    "classes": (
        "script",
        {"policy": "evil.Policy", "policy_kwargs": CLASSES, "rule": "evil.Rule()", "env": "evil:Env"},
    ),
    "a language model": ("language", {"experiment": LANGUAGE, "algorithm": "ppo"}),
    "scored rollouts": ("language", {"experiment": {}, **SCORED}),
    "a script": ("language", {"experiment": {}, **SCRIPT}),
    "a comparison": ("comparison", {"env": "evil:Env", "env_kwargs": {}}),
}
"""What a run of each kind names: everything is of the module or the folder `evil`."""


def write_language_run(path: Path) -> None:
    directory = RunDirectory.create(path, {"kind": "language", "arm": "iif", "seed": 0, "rounds": 2})
    for number in (1, 2):
        texts = {"prompt": ["ab", "cd", "ef", "gh"], "response": ["c", "d", "e", "f"]}
        table: dict[str, Any] = {
            **{"record_id": [4 * number + row for row in range(4)], **texts, "reward": [0.0, 1.0, 0.5, 0.0]},
            **{"tokens": [2] * 4, "ended": [True] * 4, "log_prob": [-1.0] * 4, "advantage": [1.0, -1.0, 0.5, 0.0]},
            **{"prompt_ids": [[2, 3]] * 4, "response_ids": [[4, 1]] * 4, "score": [0.25, -0.25, 0.5, -0.5]},
            **{"keep": [True] * 4, "weight": [1.0] * 4, "reason": [None] * 4},
        }
        directory.write_round("records", number, pl.DataFrame(table))
        directory.write_round("answers", number, pl.DataFrame({**texts, "reward": [0.0] * 4}))
        directory.append("metrics", {"round": number, "reward": 0.4, "kept": 4, "records": 4, "kl_coef": 0.1})
        directory.append("timings", {"round": number, "collection_cpu": 1.0, "optimisation_cpu": 1.0})
    directory.release()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind, with parts of a user's beside them."""
    path = tmp_path_factory.mktemp("strangers") / "base"
    settings = {"hyperparameters": {"n_steps": 32, "batch_size": 32, "n_epochs": 1}, "policy_kwargs": {"net_arch": [8]}}
    config = configure(arm="iif", env="FrozenLake-v1", rounds=2, eval_episodes=2, **settings)
    run(config, path / "agent", lambda *done: None, recordings=[1, 2])
    toy = PPO("MlpPolicy", gym.make("FrozenLake-v1"), n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    toy.learn(64, callback=InfluenceCallback(IIF(0.5), run=path / "script", recordings=[1, 2]))
    write_language_run(path / "language")
    for name in ("agent", "script", "language"):
        write_flag(path / name, 2, RunDirectory.open(path / name).round("records", 2)["record_id"][0], "see this")
    standard, compared = replace(config, arm="ppo"), path / "comparison"
    run(standard, compared / "runs" / "ppo" / "seed_0", lambda *done: None)
    curves = {
        "ppo": {0: read_curve(standard, compared / "runs" / "ppo" / "seed_0")},
        "iif": {0: read_curve(config, path / "agent")},
    }
    shutil.copytree(path / "agent", compared / "runs" / "iif" / "seed_0")
    write_json(compared / "comparison.json", [standard.to_json(), config.to_json()])
    write_json(compared / "summary.json", {"FrozenLake-v1": summarise(curves, standard="ppo")})
    for name in ("evil", "mine"):
        make_model().save_pretrained(path / name / "model")
        make_tokenizer().save_pretrained(path / name / "model")
        (path / name / f"{name}.py").write_text(CODE, encoding="utf-8")
        rows = [{"prompt": "ab", "completion": "c", "response": "c", "reward": reward} for reward in (0.0, 1.0)]
        (path / name / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (path / "mine" / "sweep.toml").write_text('name = "sweep"\n', encoding="utf-8")
    return path


class Watch(list[Any]):
    """The files of a folder that were opened, and the code there that ran."""

    folder = ""

    def __call__(self, event: str, arguments: Any) -> None:
        if self.folder and event in ("open", "exec", "listdir"):
            file = getattr(arguments[0], "co_filename", arguments[0])
            if isinstance(file, str | Path) and os.path.abspath(file).startswith(f"{self.folder}/"):
                self.append((event, str(file)))


WATCH = Watch()
sys.addaudithook(WATCH)


@pytest.fixture
def stage(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the runs, which are a stranger's there, in the working directory of whoever reads them."""
    path = shutil.copytree(base, tmp_path / "stage")
    monkeypatch.chdir(path)
    for folder in ("evil", "mine"):
        monkeypatch.syspath_prepend(str(path / folder))
    monkeypatch.setattr(envpool, "make", lambda name, **options: WATCH.append(("pool", name)) or int("no pool"))
    monkeypatch.setattr("whence.page.server.serve", visit)
    monkeypatch.setattr(sys.modules["whence.cli.app"], "load_command", load_once)
    monkeypatch.setattr(WATCH, "folder", str(path / "evil"))
    WATCH.clear()
    yield path
    for name in [name for name in sys.modules if {"evil", "mine"} & {*name.split(".")}]:
        del sys.modules[name]


class Answers:
    """Answers the page's long questions in this process."""

    def ask(self, answer: Any, explored: Any, number: int, record: int, setting: Any) -> Any:
        return answer(explored, number, record, setting, lambda *progress: None)


def visit(runs: Any, *, continuations: int, on_start: Callable[[str], None], **options: Any) -> None:
    """Ask for everything that a page can ask for, in place of serving it."""
    answers: Any = Answers()
    app = make_app(runs, answers, answers, answers, continuations=continuations)
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    for place, explored in enumerate(runs):
        numbers = explored.directory.rounds()
        try:
            record = explored.directory.round("records", numbers[-1])["record_id"][0]
        except (WhenceError, IndexError):
            record = 0
        names = {"run": place, "round": numbers[-1] if numbers else 1, "record": record}
        for route in app.routes:
            if "GET" in route.methods:  # type: ignore[attr-defined]
                path = route.path.replace(":int", "").format(**names)  # type: ignore[attr-defined]
                assert client.get(path).status_code in (200, 400, 404), path


PARTS: Mapping[str, str] = {
    **{"--env": "mine:Env", "--policy": "mine:Policy", "--reward": "mine/mine.py:reward", "--model": "mine/model"},
    **{"--reference": "mine/model", "--demonstrations": "mine/data.jsonl", "--dataset": "mine/data.jsonl"},
}
"""Parts of the user's; any other option that takes a text gets "mine:part"."""

CHEAP: Mapping[str, Any] = {
    **{"--seeds": 1, "--top": 1, "--answers": 2, "--test-episodes": 2, "--learning-rate": 0.01, "--epochs": 1},
    **{"--continuations": 2, "--no-browser": None, "--workers": 1},
}

WAYS: list[Mapping[str, Any]] = [
    *({}, {"--flagged": None}, {"--where": "advantage > 0.9"}, {"--record": "RECORD"}),
    *({"--observation": 0, "--action": 0}, {"--target": "action", "--record": "RECORD"}),
    {"--from": 1, "--rounds": 1},
    *({"--prompt": "ab", "--response": "c", "--by": "bm25"}, {"--prompt": "ab", "--response": "c", "--by": "nearest"}),
]
"""What can be asked of a run."""

BEGINNINGS: Mapping[str, list[Any]] = {
    "train": ["CartPole-v1", "--rounds", 1, "--run", "RUN"],
    "compare": ["CartPole-v1", "--arms", "ppo,iif", "--rounds", 1, "--out", "RUN"],
    "sweep": ["mine/sweep.toml", "--out", "RUN"],
    "list": [],
    "llm train": ["--run", "RUN"],
    "llm compare": ["--out", "RUN"],
    "llm score": ["mine/data.jsonl", "--model", "mine/model", "--run", "RUN"],
}
"""Commands that do not begin with a run; one that is not here does."""

NAMES = {**COMMANDS, **{f"llm {name}": place for name, place in LLM_COMMANDS.items()}}
load_once = functools.cache(load_command)
"""Typer takes as long to make a command as most of them take here."""


def list_calls(command: str, path: Path, record: int, *, crossed: bool = False) -> list[list[str]]:
    """Return the calls of a command on a run; its options for runs of the other kind are left out."""
    other = AGENTS if path.name == "language" else LANGUAGE_MODELS
    return [*_list_calls(command, path, record, other, crossed)]


def _list_calls(command: str, path: Path, record: int, other: str, crossed: bool) -> Iterator[list[str]]:
    """Yield a command's words: each way to ask, without a part of the user's, and with all; if `crossed`, with each.

    Otherwise each part stands alone in the last way; for pages, which load an agent as other commands do, and for
    comparisons nowhere.
    """
    loaded = load_once(command.split()[-1], NAMES[command])
    known = [each for each in loaded.params if getattr(each, "rich_help_panel", None) != other]
    options = {name: each for each in known for name in (*each.opts, *each.secondary_opts)}
    required = ["RUN" for each in loaded.params if each.param_type_name == "argument" and each.required]
    begin = [*command.split(), *BEGINNINGS.get(command, required)]
    cheap = {name: value for name, value in CHEAP.items() if name in options and "train" not in command}
    texts = [name for name, each in options.items() if each.type_descriptor.annotation in (str, list[str])]
    taken = {*cheap, *begin, *itertools.chain(*WAYS)}
    parts = {name: PARTS.get(name, "mine:part") for name in texts if name[0] == "-" and name not in taken}
    together = {name: value for name, value in parts.items() if name in PARTS}
    ways = [way for way in WAYS if way.keys() <= options.keys() and not (way and command in BEGINNINGS)]
    is_alone = command not in ("view", "report") and path.name != "comparison"
    for way in ways:
        alone = parts.items() if crossed or (is_alone and way is ways[-1]) else ()
        for supplied in ({}, *({name: value} for name, value in alone), together):
            words = [*begin, *(word for each in ({**cheap, **way, **supplied}).items() for word in each)]
            names = {"RUN": path, "RECORD": record}
            yield [str(names.get(word, word)) for word in words if word is not None]


def make_hostile(stage: Path, kind: str) -> tuple[Path, int]:
    """Let a run name what is evil; return the path for commands, and one of its records."""
    name, settings = HOSTILE[kind]
    path = stage / name if name != "comparison" else stage / name / "runs" / "iif" / "seed_0"

    def edit(document: Any) -> None:
        if document["config"].get("experiment") and "experiment" not in settings:
            document["config"]["experiment"] |= settings
        document["config"] |= settings

    rewrite(path / "config.json", edit)
    if name == "comparison":
        rewrite(stage / name / "comparison.json", lambda configs: configs[1].update(settings))
    return stage / name, RunDirectory.open(path).round("records", 2)["record_id"][0]


LANGUAGE_KINDS = ("a language model", "scored rollouts", "a script")
REFUSED = {
    *((command, kind) for command in ("attribute", "again") for kind in LANGUAGE_KINDS),
    *((command, "classes") for command in ("attribute", "why", "prove", "again")),
    *(("audit", kind) for kind in HOSTILE),  # it takes an environment
    *(("import", kind) for kind in HOSTILE),  # it takes a file of rollouts
    *((command, "a comparison") for command in ("attribute", "why", "prove", "again", "show", "findings", "diff")),
}
"""Commands that can do nothing with a run of some kind, whatever the user supplies."""


CROSSED = pytest.mark.parametrize(
    "crossed", [pytest.param(False, id=""), pytest.param(True, id="crossed", marks=pytest.mark.long)]
)


LIKE_OTHERS = (
    # These refuse each run, or read none.
    *(
        (command, kind)
        for command in (*BEGINNINGS, "audit", "import")
        for kind in HOSTILE.keys() - {"an environment", "a script"}
        if (command, kind) != ("compare", "a comparison")
    ),
    *(("view", kind) for kind in ("a pool", "wrappers", "a comparison")),
    *(("report", kind) for kind in ("a pool", "wrappers")),
    *(("prove", kind) for kind in ("wrappers", "scored rollouts")),
    *((command, "a pool") for command in ("attribute", "why", "show", "diff")),
)
"""What reaches code that another kind of run, or the page of the other command, reaches as well."""


@CROSSED
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(*pair, marks=pytest.mark.long if pair in LIKE_OTHERS else ())
        for pair in itertools.product(NAMES, HOSTILE)
    ],
)
def test_nothing_of_a_stranger_runs(command: str, kind: str, crossed: bool, stage: Path, whence: Any) -> None:
    path, record = make_hostile(stage, kind)
    codes = set()
    for words in list_calls(command, path, record, crossed=crossed):
        code, out, err = whence(*words)
        codes.add(code)
        assert (code in (0, 2), list(WATCH)) == (True, []), (words, code, out, err)
    is_refused = command in (*BEGINNINGS, "table") or (command, kind) in REFUSED
    assert (0 in codes) == (not is_refused or command == "list"), "the calls do not reach what the command does"


TRUSTED = {
    **dict.fromkeys(("an environment", "wrappers"), "why RUN --trust"),
    "a pool": "prove RUN --record RECORD --top 1 --seeds 1 --test-episodes 1 --trust",
    "a language model": "prove RUN --prompt ab --response c --by bm25 --top 1 --seeds 1 --learning-rate 0.01 --trust",
    "scored rollouts": "why RUN --record RECORD --trust",
    "a script": "why RUN --prompt ab --response c --trust",
    "a comparison": "view RUN --no-browser --trust",
}


@pytest.mark.parametrize("kind", TRUSTED)
def test_it_would_have_run(kind: str, stage: Path, whence: Any) -> None:
    path, record = make_hostile(stage, kind)
    names = {"RUN": path, "RECORD": record}
    whence(*(names.get(word, word) for word in TRUSTED[kind].split()))
    assert WATCH


class TestProofs:
    QUESTION = ("--record", 40, "--top", 4, "--seeds", 1, "--test-episodes", 0, "--env", "mine:Env", "--json")

    def test_one_that_somebody_wrote_is_measured_anew(
        self, stage: Path, whence: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def prove(*options: Any) -> tuple[Any, str]:
            caplog.clear()
            code, out, err = whence("prove", stage / "agent", *self.QUESTION, *options)
            assert code == 0, err
            return json.loads(out), caplog.text

        measured, said = prove()
        assert "trainings" not in said
        again, said = prove()
        assert (again, "holds 4 trainings" in said, "not measured again" in said) == (measured, True, True)
        (file,) = (stage / "agent" / "proofs").iterdir()

        def forge(content: Any) -> None:
            for row in content["rows"]:
                row["outcomes"] = dict.fromkeys(row["outcomes"], -9.0)

        for options in ((), ("--trust",)):
            rewrite(file, forge)
            again, said = prove(*options)
            assert (again, "measured anew" in said) == (measured, True)

    def test_one_of_another_run_is_not_taken(self, tmp_path: Path) -> None:
        counts: list[int] = []

        def train(folder: Path) -> Path:
            counts.append(0)

            def measure(seed: int) -> dict[str, float]:
                counts[-1] += 1
                return {"outcome": 1.0}

            return retraining.train_variants({"all": measure, "without": measure}, 1, folder, [], {})[1]

        file = train(tmp_path / "one")
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        assert (train(tmp_path / "one"), train(tmp_path / "two").name) == (file, file.name)
        assert counts == [2, 0, 2]


SETTINGS = ("FrozenLake-v1", "--rounds", "2", "--eval-episodes", "2", "--n-steps", "32", "--batch-size", "32")
SETTINGS = (*SETTINGS, "--n-epochs", "1", "--policy-kwargs", '{"net_arch": [8]}')
SOURCES_OF_MINE = {"model": "mine/model", "dataset": "mine/data.jsonl", "reward": "mine/mine.py:reward"}
CONTINUED: Mapping[str, tuple[str, ...]] = {
    "agent": ("train", *SETTINGS, "--run", "agent"),
    "comparison": ("compare", *SETTINGS, "--arms", "ppo,iif", "--seeds", "1", "--out", "comparison"),
    "language": (
        *("llm", "train", "--selection", "none", "--rounds", "2", "--run", "language"),
        *(word for name, source in SOURCES_OF_MINE.items() for word in (f"--{name}", source)),
    ),
}
"""Trainings of the very configurations that the stranger's runs have."""


@pytest.mark.parametrize("name", CONTINUED)
def test_no_training_takes_a_strangers_rounds(name: str, stage: Path, whence: Any) -> None:
    config = describe(LanguageConfig("ppo", 0, task=None, settings={"rounds": 2}, **SOURCES_OF_MINE))
    rewrite(stage / "language" / "config.json", lambda document: document["config"].update(config))

    def is_refused() -> bool:
        return "is not signed as a run that you made in this place" in " ".join(whence(*CONTINUED[name])[2].split())

    before = read_digests(stage / name)
    assert is_refused()
    assert read_digests(stage / name) == before
    sign_runs(stage / name)
    assert not is_refused()


def test_a_checkpoint_sets_nothing_but_what_trainings_keep(stage: Path) -> None:
    file = stage / "script" / "checkpoints" / "round_00002.safetensors"
    content = load_tree(file)
    content["model"]["counters"]["tensorboard_log"] = "evil"
    content["model"]["observed"]["gamma"] = 0.5
    save_tree(file, content)
    model, _ = resume(stage / "script", gym.make("FrozenLake-v1"))
    assert (model.num_timesteps, model.tensorboard_log, model.gamma) == (64, None, 0.99)


@pytest.mark.parametrize("name", ["load", "_dynamo", "evil", 7])
def test_a_dtype_is_one_of_torchs(name: Any, stage: Path) -> None:
    rewrite(stage / "language" / "config.json", lambda document: document["config"].update(dtype=name))
    with pytest.raises(WhenceError, match="one of torch's is needed"):
        load_start_policy(RunDirectory.open(stage / "language"), 1, "mine/model")


READING = ("show", "findings", "why", "attribute", "report", "view", "prove", "table", "train", "llm train")


@contextmanager
def pipe_in_place(file: Path) -> Iterator[list[str]]:
    """Put a pipe in the place of a file; yields a list that gets the name of one that somebody waited for."""
    waited: list[str] = []
    ended = threading.Event()
    if file.exists():
        file.unlink()
    os.mkfifo(file)

    def answer() -> None:
        while not ended.is_set():
            with suppress(OSError):  # nobody reads
                writer = os.open(file, os.O_WRONLY | os.O_NONBLOCK)
                if stat.S_ISFIFO(os.fstat(writer).st_mode):  # no file that was written in its place
                    waited.append(file.name)
                os.close(writer)
            time.sleep(0.005)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield waited
    finally:
        ended.set()
        thread.join()


FILES = {
    "agent": [
        *("config.json", ".signature", "metrics.parquet", "timings.parquet", "evaluations.parquet", "flags.parquet"),
        *("records/round_00002.parquet", "records/round_00001.parquet", "episodes/round_00002.parquet"),
        *("policies/round_00002.safetensors", "recordings/round_00002.safetensors", ".lock", "report.html"),
        "checkpoints/round_00002.safetensors",
    ],
    "language": [
        *("config.json", "metrics.parquet", "timings.parquet", "flags.parquet", "vocabulary.parquet"),
        *("records/round_00002.parquet", "answers/round_00002.parquet"),
    ],
    "comparison": ["comparison.json", "summary.json", "curves.parquet", "runs/iif/seed_0/config.json"],
}


ALIKE = {"agent": ("report",), "comparison": ("view", "llm train"), "language": ("report",)}
"""Commands that read a run of a kind as others do."""

NOT_SHOWN = ("report.html", ".lock", "recordings/round_00002.safetensors", "checkpoints/round_00002.safetensors")
"""Files of a run that its page shows nothing of."""


@CROSSED
@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in FILES.items() for file in files])
def test_nobody_waits_for_a_pipe(name: str, file: str, crossed: bool, stage: Path, whence: Any) -> None:
    RunDirectory.open(stage / "agent").sign()
    path, record = stage / name, 40 if name == "agent" else 8
    files = {each.relative_to(path).as_posix() for each in path.rglob("*")}
    assert file in files or file in ("report.html", "vocabulary.parquet", "curves.parquet")
    skipped = (*ALIKE[name], *(("view",) if file in NOT_SHOWN else ()))
    with pipe_in_place(path / file) as waited:
        for command in READING:
            if crossed or command not in skipped or (command, file) == ("report", "report.html"):
                code, out, err = whence(*list_calls(command, path, record)[0])
                assert (waited, code in (0, 2)) == ([], True), (command, code, out, err)


@pytest.mark.parametrize("file", ["checkpoint-1/trainer_state.json", "completions/step_1/train/effective/traces.jsonl"])
def test_rollouts_are_no_pipes(file: str, stage: Path) -> None:
    (stage / file).parent.mkdir(parents=True)
    rollouts = shutil.copytree(stage / "mine", stage / "completions", dirs_exist_ok=True)
    if "step_1" in file:
        (rollouts / "data.jsonl").unlink()
    with pipe_in_place(stage / file) as waited, suppress(WhenceError):
        assert stage / file not in list_files(rollouts, Counter())
    assert not waited


def test_a_proof_is_no_pipe(stage: Path, whence: Any) -> None:
    words = ("prove", stage / "agent", *TestProofs.QUESTION)
    assert whence(*words)[0] == 0
    (file,) = (stage / "agent" / "proofs").iterdir()
    with pipe_in_place(file) as waited:
        assert whence(*words)[0] == 0
    assert not waited


@pytest.mark.parametrize("place", ["/dev/zero", "/dev", pytest.param(".", marks=pytest.mark.long)])
def test_devices_and_directories_are_no_tables(place: str, stage: Path, whence: Any) -> None:
    file = stage / "agent" / "records" / "round_00002.parquet"
    file.unlink()
    file.symlink_to(place)
    for command in READING:
        code, out, err = whence(*list_calls(command, stage / "agent", 40)[0])
        assert code in (0, 2), (command, out, err)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_model_names_no_kernel(key: str, is_adapter: bool, stage: Path) -> None:
    folder = stage / "mine" / "model"
    load_checkpoint(str(folder), "float32")
    rewrite(folder / "config.json", lambda config: config.update({key: {"": "evil/kernel"}}))
    if is_adapter:
        folder = stage / "mine" / "adapter"
        folder.mkdir()
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "mine/model"}
        (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(WhenceError, match=r"cannot be loaded: .*'evil/kernel' as .*code of the hub"):
        load_checkpoint(str(folder), "float32")


@pytest.mark.parametrize(
    "kind", [pytest.param("an environment", marks=pytest.mark.long), "a language model", "a comparison"]
)
def test_a_page_says_that_its_figures_are_the_files(kind: str, stage: Path, whence: Any) -> None:
    path, _ = make_hostile(stage, kind)
    pages = []
    for options in ((), ("--trust",) if kind == "a language model" else ()):
        assert whence("report", path, "--out", stage / "page.html", *options)[0] == 0
        pages.append("shown as the files say" in (stage / "page.html").read_text(encoding="utf-8"))
    assert pages == [True, kind != "a language model"]
