"""What is read is checked where it enters: columns, tensors, configurations, JSON; by hand, a case for each check."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toys import mlp_view, model, records_for
from whence import IIF, Influence, InvalidInfluence, Return, RoundRecording, RunDirectory, WhenceError, attribute
from whence.errors import RunDirectoryError
from whence.experiments import LanguageConfig, RunConfig, read_config
from whence.experiments.rl.stored import load_policy
from whence.sb3 import InfluenceCallback


@pytest.fixture(scope="module")
def toy():
    return model()


@pytest.fixture
def run(tmp_path, toy) -> RunDirectory:
    trained = model()
    trained.learn(32, callback=InfluenceCallback(IIF(0.5), run=tmp_path / "run", recordings=[1]))
    return RunDirectory.open(tmp_path / "run")


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
        (edit("provenance", "more", 1), "unexpected keyword argument 'more'"),
        (lambda texts, tensors: tensors.pop("scores"), "'scores'"),
        (lambda texts, tensors: tensors.update(scores=tensors["scores"][:3]), "have the shapes"),
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
        ({"env": "CartPole-v1"}, "lacks 'arm'"),
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
