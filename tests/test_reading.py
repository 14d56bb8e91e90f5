"""What is read is checked where it enters: columns, tensors, configurations, JSON; by hand, a case for each check."""

import io
import json
from pathlib import Path

import polars as pl
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from toys import mlp_view, model, records_for
from whence import IIF, Influence, InvalidInfluence, Return, RoundRecording, RunDirectory, WhenceError, attribute
from whence.cli.console import make_table, parse_json
from whence.errors import NonFinite, ReplayError, RunDirectoryError
from whence.experiments import LanguageConfig, RunConfig
from whence.experiments.kinds import read_config
from whence.experiments.rl.stored import load_policy, read_records
from whence.llm.ppo.ppo_run import check_model, read_model
from whence.moments import find_moment, find_moments, group_scores, read_axes
from whence.sb3 import InfluenceCallback, collect
from whence.sb3.episodes.episode_replay import read_episode


@pytest.fixture(scope="module")
def toy():
    return model()


@pytest.fixture
def run(tmp_path, toy) -> RunDirectory:
    trained = model()
    trained.learn(32, callback=InfluenceCallback(IIF(0.5), run=tmp_path / "run", recordings=[1]))
    return RunDirectory.open(tmp_path / "run")


def test_groups_of_odd_tables():
    table = pl.DataFrame({"record_id": [1, 2], "score": [1.0, -1.0], "action": [0, None], "observation.a": [3, 4]})
    assert group_scores(table, "action")["group"].to_list() == ["unknown", "0"]
    assert group_scores(table, "region")["group"].to_list() == ["state 4", "state 3"]
    assert group_scores(table.clear(), "region").is_empty()
    assert read_axes(table.clear()) == {}


def test_json_of_any_depth(tmp_path):
    for text in ("[" * 100_000, "9" * 5000, '{"a":' * 5000):
        with pytest.raises(WhenceError, match="which is not JSON") as raised:
            parse_json("--x", text, "1")
        assert len(str(raised.value)) < 600
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunDirectoryError, match="cannot be read as JSON"):
            RunDirectory.open(tmp_path)


def rewrite(path: Path, change) -> None:
    """Change the header's texts and the tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        texts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(texts, tensors)
    save_file(tensors, path, texts)


def edit(key, name, value):
    """Return a change of one entry of a header's document."""
    return lambda texts, tensors: texts.update({key: json.dumps({**json.loads(texts[key]), name: value})})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("about", "sizes", [1]), "does not hold what RoundRecording.save writes"),
        (edit("about", "epochs", []), "epochs and minibatches"),
        (edit("about", "update", {}), "does not hold what RoundRecording.save writes"),
        (lambda texts, tensors: texts.update(about="["), "header of .* is not readable as JSON"),
        (lambda texts, tensors: texts.update(about="[]"), "holds list, and an object is needed"),
        (lambda texts, tensors: tensors["minibatches"].fill_(99), "a record that is not there"),
        (lambda texts, tensors: tensors.pop("generator"), "does not hold what RoundRecording.save writes"),
    ],
)
def test_a_recording_whose_parts_do_not_fit(run, change, message):
    path = run.round_path("recordings", 1)
    assert RoundRecording.load(path).number == 1
    rewrite(path, change)
    with pytest.raises(RunDirectoryError, match=message):
        RoundRecording.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("provenance", "more", 1), "not one that Influence.save writes"),
        (edit("provenance", "target", 1), "not one that Influence.save writes"),
        (edit("provenance", "parameters", "w"), "not one that Influence.save writes"),
        (lambda texts, tensors: tensors.pop("scores"), "`scores` is missing"),
        (lambda texts, tensors: tensors.update(scores=tensors["scores"].long()), "`scores` is torch.int64"),
    ],
)
def test_scores_with_another_provenance(tmp_path, change, message):
    view = mlp_view()
    path = tmp_path / "scores.safetensors"
    attribute(view, records_for(view), target=Return()).save(path)
    rewrite(path, change)
    with pytest.raises(InvalidInfluence, match=message):
        Influence.load(path)


def test_a_policy_of_other_numbers(run, toy):
    tensors = run.policy(1)
    for change, message in ((torch.zeros(99), "does not fit"), (tensors["action_net.bias"] * torch.nan, "not finite")):
        run.write_policy(1, {**tensors, "action_net.bias": change})
        with pytest.raises(RunDirectoryError, match=rf"policy of round 1 .*{message}.*action_net\.bias"):
            load_policy(run, 1, toy)


def test_configurations_from_json():
    agent = {"env": "CartPole-v1", "arm": "iif", "seed": 0}
    assert read_config(agent) == RunConfig.from_json(agent)
    for values, message in (
        ({**agent, "round": 3}, "has no 'round'. Did you mean rounds"),
        ({"env": "CartPole-v1"}, "lacks 'arm' and 'seed'; it needs env, arm, seed"),
        ({**agent, 3: 4}, "has no 3"),
    ):
        with pytest.raises(WhenceError, match=message):
            RunConfig.from_json(values)
    for values in ([], "x", None, 3):
        with pytest.raises(WhenceError, match="a table of settings is needed"):
            read_config(values)
    for name, value in (("arm", 3), ("lora", "4"), ("settings", []), ("dtype", 1), ("model", {}), ("seed", None)):
        with pytest.raises(WhenceError, match=rf"^{name} is .*; .* is needed"):
            LanguageConfig.from_json({"arm": "iif", "seed": 0, name: value})
    with pytest.raises(WhenceError, match="rounds is 'many'; a whole number"):
        LanguageConfig.from_json({"arm": "iif", "seed": 0, "settings": {"rounds": "many"}})


def test_tables_show_text_as_it_is():
    console = Console(file=io.StringIO(), width=200)
    console.print(make_table("a\x1b[2J", ["b"], [["[link=http://a]c[/link]\x1b]8;;d"]]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert "[link=http://a]c[/link]" in text


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pl.lit(9).alias("action"), r"action of record 0 of .* is 9, which is not in Discrete\(3\)"),
        (pl.lit(1.0).alias("observation"), r"`observation` holds Float64; observations of Box.* are needed"),
        (pl.lit(None).cast(pl.Boolean).alias("episode_start"), "`episode_start` holds Boolean or nulls"),
    ],
)
def test_records_of_another_environment(run, toy, column, message):
    with pytest.raises(WhenceError, match=message):
        read_records(run, run.round("records", 1).with_columns(column), toy)


def test_a_policy_whose_outputs_overflow():
    toy = model()
    records = collect(toy)
    with torch.no_grad():
        toy.policy.action_net.weight.fill_(torch.inf)
    with pytest.raises(NonFinite, match="distribution of actions is not finite"):
        attribute(toy.policy, records, target=Return(), engine="loop")


def test_a_language_models_checkpoint_that_holds_something_else():
    toy = model()
    toy.learn(32)
    optimizer = toy.policy.optimizer
    content = read_model(toy.policy, optimizer)
    check_model(toy.policy, content, Path("here"))
    name = next(iter(content["model"]))
    for wrong, message in (
        ({**content, "model": {**content["model"], name: {}}}, "parameters that train differ"),
        ({**content, "model": 3}, "parameters that train differ"),
        ({**content, "optimizer": {name: 3}}, "belongs to no parameter"),
        ({**content, "optimizer": [3]}, "belongs to no parameter"),
        ({**content, "optimizer": {name: {"exp_avg": torch.zeros(2)}}}, "belongs to no parameter"),
    ):
        with pytest.raises(RunDirectoryError, match=f"here .*{message}"):
            check_model(toy.policy, wrong, Path("here"))


def test_an_episode_without_its_generators_state(run):
    episode = run.round("episodes", 1)["episode_id"][0]
    for column, message in ((pl.lit("[").alias("generator_state"), "not readable as JSON"), (None, "no column")):
        table = run.round("episodes", 1)
        run.write_round("episodes", 1, table.drop("generator_state") if column is None else table.with_columns(column))
        with pytest.raises(ReplayError, match=message):
            read_episode(run, episode)


def test_a_moment_of_records_without_a_score():
    records = pl.DataFrame({"record_id": [3, 4], "episode_id": [0, 0], "score": [None, None]})
    assert records.schema["score"] == pl.Null
    moment = find_moment(records, 4)
    assert (moment.total, moment.records) == (0.0, 1)
    assert moment.score != moment.score
    assert find_moments(records, lowest=True, most=3) == []
