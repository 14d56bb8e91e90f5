"""Power cuts: a run with a file that is cut off continues to the bits of one without, or names that file."""

import json
import logging
import shutil

import pytest

from helpers import resuming
from helpers.language_runs import tiny
from helpers.language_training import make_model, make_tokenizer
from helpers.toys import copy_signed
from helpers.trl_training import make_trainer
from whence import IIF
from whence.core import WhenceError, preserve_rng_state
from whence.lab import agents
from whence.lab.agents import configure
from whence.lab.language.training import run as train_language
from whence.llm.rollout_scores import score_rollouts
from whence.runs import RunDirectory, read_tensor_file, write_flag
from whence.runs.files import RowTable


class Stop(BaseException):
    """The power is cut."""


def stop_after(rounds, last):
    """Return a function that is called with the number of a round, and stops after one of them, unless it is None."""

    def on_round(number, _):
        if number == last:
            raise Stop

    return on_round


def by_callback(path, last):
    resuming.train(resuming.MODELS["walk"], path, until=None if last is None else (last + 0.5) / resuming.ROUNDS)
    if last is not None:
        raise Stop


def by_train(path, last):
    settings = {"n_steps": 32, "batch_size": 16, "n_epochs": 1}
    config = configure(env="CartPole-v1", arm="iif", rounds=3, eval_episodes=2, hyperparameters=settings)
    agents.run(config, path, stop_after(3, last))


def by_llm_train(path, last):
    train_language(tiny("iif", settings={"rounds": 3, "save_every": 1}), path, stop_after(3, last))


def by_trl(path, last):
    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            if state.global_step == (last or 99) + 1:
                raise Stop

    trainer = make_trainer(
        *("grpo", path / "trl", IIF(0.5)),
        run=path,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
    )
    trainer.add_callback(Interrupt())
    trainer.train(resume_from_checkpoint=trainer.find_checkpoint() is not None or None)


def by_llm_score(path, last):
    rows = [
        {"step": step, "prompt": "ab", "response": text, "reward": float(step + len(text))}
        for step in (1, 2, 3)
        for text in ("cd", "efg")
    ]
    ROLLOUTS[0].write_text("\n".join(map(json.dumps, rows)))
    score_rollouts(ROLLOUTS[0], make_model(), make_tokenizer(), path, on_round=stop_after(3, last))


ROLLOUTS = []
KINDS = {each.__name__: each for each in (by_callback, by_train, by_llm_train, by_trl, by_llm_score)}
NOT_COMPARED = "checkpoints", "trl", "config.json", "timings.parquet", ".lock", ".signature"


def read_run(path):
    files = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not set(file.parts) & {*NOT_COMPARED}}


@pytest.fixture(scope="module")
def made(tmp_path_factory, laboratory_cache):
    """Return a run by its kind that was stopped in its third round, and one that was not, with a flag each."""
    runs = {}
    ROLLOUTS[:] = [tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"]

    def make(kind):
        if kind not in runs:
            folder = tmp_path_factory.mktemp(kind)
            with preserve_rng_state():
                with pytest.raises(Stop):
                    KINDS[kind](folder / "run", 2)
                write_flag(folder / "run", 1, 0, "odd")
                KINDS[kind](copy_signed(folder / "run", folder / "whole"), None)
            runs[kind] = folder / "run", folder / "whole"
        return runs[kind]

    return make


LOOKED_AT_FIRST = {"metrics.parquet", "timings.parquet", "flags.parquet", "config.json", "round_00001.parquet"}
CASES = [(kind, state) for kind in KINDS for state in ("stopped", "finished")]
QUICK = [("by_callback", "stopped"), ("by_train", "finished"), ("by_llm_score", "stopped")]


def name_damage(file):
    """Return the error of reading a table or tensors; nothing if they are whole."""
    try:
        if file.suffix == ".parquet":
            RowTable(file).read()
        if file.suffix == ".safetensors":
            read_tensor_file(file, WhenceError)
    except WhenceError as damage:
        return str(damage)
    return ""


def check_cut_off(kind, source, cut, share, expected, path, caplog):
    """Return what is wrong with a run that continues without the end of a file; None: nothing.

    What is not needed to continue is named when it is read.
    """
    caplog.clear()
    file, error = copy_signed(source, path) / cut, ""
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    try:
        with caplog.at_level(logging.WARNING, logger="whence"), preserve_rng_state():
            KINDS[kind](path, None)
    except WhenceError as refusal:
        error = str(refusal)
    found = read_run(path)
    differing = {name for name in expected if found.get(name) != expected[name]}
    is_named = file.name in error + caplog.text or (file.exists() and file.name in name_damage(file))
    shutil.rmtree(path)
    # Flags of rounds that are scored again go with them.
    others = set() if error else differing - {str(cut), *(["flags.parquet"] if kind == "by_llm_score" else [])}
    return (str(cut), share, differing, error) if others or (differing and not is_named) else None


@pytest.mark.parametrize(
    ("kind", "state", "some"),
    [
        *((*case, True) for case in QUICK),
        *(pytest.param(*case, False, marks=pytest.mark.long) for case in CASES),
    ],
)
def test_a_run_continues_without_the_end_of_a_file(made, tmp_path, caplog, kind, state, some):
    stopped, whole = made(kind)
    source, expected = stopped if state == "stopped" else whole, read_run(whole)
    files = [file.relative_to(source) for file in sorted(source.rglob("*")) if file.is_file() and file.name != ".lock"]
    cases = [
        (file, share)
        for file in files
        for share in (0.0, 0.5)
        if not some or (file.name in LOOKED_AT_FIRST and share == 0.0)
    ]
    assert len(cases) >= 5
    wrong = [check_cut_off(kind, source, *case, expected, tmp_path / "run", caplog) for case in cases]
    assert [each for each in wrong if each] == []


def test_a_damaged_table_is_kept_aside_and_counts_as_lost(made, tmp_path):
    path = shutil.copytree(made("by_callback")[0], tmp_path / "run")
    (path / "metrics.parquet").write_bytes(b"cut")
    before = read_run(path)
    with pytest.raises(WhenceError, match="another configuration"):
        RunDirectory.begin(path, {"env": "other"})
    assert read_run(path) == before
    with preserve_rng_state():
        by_callback(path, None)
    assert (path / "metrics.parquet.damaged").read_bytes() == b"cut"
    assert RunDirectory.open(path).table("metrics")["round"].to_list()[-1] == resuming.ROUNDS
