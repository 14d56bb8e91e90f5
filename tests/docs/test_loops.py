"""The recipes for PPO loops of other libraries: whence reads their records, and they train on those it keeps."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import whence
from helpers.examples import script
from whence.core import preserve_rng_state

LIBRARIES = {
    "cleanrl": "gymnasium",
    "rllib": "ray",
    **{name: name for name in ("torchrl", "tianshou", "skrl", "rsl_rl")},
}
SELECTIVE = {
    "skrl": "SelectiveMemory",
    "tianshou": "SelectivePPO",
    "rsl_rl": "SelectivePPO",
    "rllib": "SelectiveLearner",
}
# RLlib starts Ray, which takes some ten seconds.
MODULES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "rllib" else ()) for name in LIBRARIES]
)
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True, scope="module")
def _ray():
    """Ray, which RLlib starts, ends with this module."""
    yield
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()


@pytest.fixture(autouse=True)
def _validation():
    """skrl and rsl_rl stop torch's distributions from checking their arguments, in the whole process."""
    before = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution._validate_args = before


class Chosen:
    """A rule that keeps what `keeps` says of the positions, and then calls `then` with the mask."""

    needs_influence = True

    def __init__(self, keeps: Any, then: Any = None) -> None:
        self.keeps, self.then = keeps, then

    def select(self, records: whence.RecordBatch, influence: Any, progress: Any) -> whence.Selection:
        keep = self.keeps(torch.arange(len(records)))
        if self.then is not None:
            self.then(records, keep)
        return whence.Selection.dropping(keep, "test")


def keep_all(positions):
    return positions >= 0


def keep_three_of_four(positions):
    return positions % 4 > 0  # 384, which rsl_rl cuts into four minibatches without a rest


class NoRun:
    """What a recipe does without whence: nothing is scored or written, and every row trains."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def write_round(self, policy: Any, records: whence.RecordBatch, **ends: Any) -> Any:
        return SimpleNamespace(selection=SimpleNamespace(keep=keep_all(records.ids)))

    def close(self) -> None:
        pass


class Recipe:
    """A recipe that runs one round, with what it hands to whence and what it trains."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(LIBRARIES[name])
            self.module = script(f"ppo_{name}")
        self.name, self.patch, self.path = name, monkeypatch, path
        self.view = self.records = self.settings = self.owner = self.batch = None
        self.columns: dict[str, Any] = {}
        self.at_scoring: Any = None
        recipe = self
        make = whence.RecordBatch if name in ("tianshou", "rllib") else whence.RecordBatch.from_rollout

        def note(**columns: Any) -> whence.RecordBatch:
            recipe.columns = columns
            return make(**columns)

        note.from_rollout = note  # type: ignore[attr-defined]

        class WatchedRun(whence.Run):
            def write_round(self, policy: Any, records: whence.RecordBatch, **ends: Any) -> Any:
                recipe.view, recipe.records = policy, records
                recipe.settings = {"target": self.target, "objective": self.objective}
                if recipe.at_scoring is not None:
                    recipe.at_scoring()
                return super().write_round(policy, records, **ends)

        monkeypatch.setattr(self.module, "RecordBatch", note)
        monkeypatch.setattr(self.module, "Run", WatchedRun)
        if name == "rllib":
            self.watch_batches(self.module.SelectRows)
        self.selective = SELECTIVE.get(name)
        if self.selective is not None:
            self.watch(getattr(self.module, self.selective))

    def watch_batches(self, kind: Any) -> None:
        """Note the columns of RLlib's batches, which have rows that are no records."""
        recipe, call = self, kind.__call__

        def note_batch(connector: Any, *, batch: Any, **arguments: Any) -> Any:
            [recipe.batch] = batch.values()
            return call(connector, batch=batch, **arguments)

        self.patch.setattr(kind, "__call__", note_batch)

    def watch(self, kind: type) -> None:
        """Let the recipe use a subclass of `kind`, whose object becomes `owner`."""
        recipe = self

        class Watched(kind):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                recipe.owner = self

        self.patch.setattr(self.module, self.selective, Watched)

    def run(self, rule: Any) -> dict[str, torch.Tensor]:
        """Return the parameters after a round with the rule."""
        torch.manual_seed(0)
        np.random.seed(0)
        length = {"steps": 128} if self.name == "skrl" else {"rounds": 1}
        trained = self.module.main(rule, path=self.path, **length)
        if self.name == "skrl":
            models = self.owner.agent.models
            modules = [models["policy"], models["value"]]
        else:
            modules = [trained.actor, trained.critic] if self.name == "rsl_rl" else [trained]
            modules = [trained.module["default_policy"]] if self.name == "rllib" else modules
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, module in enumerate(modules)
            for name, parameter in module.named_parameters()
        }

    def train_without_whence(self) -> dict[str, torch.Tensor]:
        """Return the parameters after a round of the library's own."""
        if self.selective is None:  # the loop is the recipe's: nothing is scored, and every row trains
            self.patch.setattr(self.module, "Run", NoRun)
            return self.run(None)
        every = torch.ones(512, dtype=torch.bool)
        base = getattr(self.module, self.selective).__mro__[2]
        assert base.__module__.startswith(LIBRARIES[self.name])
        plain = {"keep": every, "rows": every.nonzero().flatten()}
        plain |= {"run": NoRun(), "select": SimpleNamespace(keep=every)} if self.name == "rllib" else {}
        self.watch(type("Plain", (base,), plain))
        return self.run(None)

    def live_columns(self) -> list[Any]:
        """The library's own columns that it trains on."""
        if self.name == "rllib":
            return [column for name, column in self.batch.items() if name != "loss_mask"]
        columns = [*self.columns.values()]
        if self.name == "cleanrl":
            columns += [getattr(self.records, name) for name in self.columns]
        elif self.name == "skrl":
            columns += [self.owner.tensors["advantages"], self.owner.tensors["returns"]]
        elif self.name == "rsl_rl":
            columns += [self.owner.storage.advantages, self.owner.storage.returns]
        return [leaf for column in columns for leaf in (column.values() if isinstance(column, dict) else [column])]

    def live_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the live columns have these rows of the records."""
        return self.batch["loss_mask"].nonzero().flatten()[rows] if self.name == "rllib" else rows

    def live_advantages(self) -> torch.Tensor:
        if self.name == "rllib":
            return self.batch["advantages"]
        if self.name == "cleanrl":
            return self.records.advantages
        owners = {"skrl": lambda: self.owner.tensors["advantages"], "rsl_rl": lambda: self.owner.storage.advantages}
        return owners[self.name]() if self.name in owners else self.columns["advantages"]


@pytest.fixture
def recipe(name, monkeypatch, tmp_path):
    return Recipe(name, monkeypatch, tmp_path / "run")


@MODULES
def test_with_every_record_kept_scores_are_the_loops_and_training_is_the_librarys_own(recipe):
    compared = []

    def compare():
        view, records = recipe.view, recipe.records.take(slice(0, 512, 4))
        with preserve_rng_state():  # some libraries draw an action wherever they compute a distribution
            outputs = view(view.parameters(), view.prepare(records))
        # The columns are the policy's: it is still the one that collected them.
        torch.testing.assert_close(outputs.log_prob.detach(), records.log_probs, rtol=0, atol=1e-5)
        assert (outputs.entropy > 0).all() or recipe.name == "rsl_rl"
        auto = whence.attribute(view, records, **recipe.settings)
        loop = whence.attribute(view, records, **recipe.settings, engine="loop")
        assert loop.scores.abs().max() > 0
        compared.append(float((auto.scores - loop.scores).abs().max() / loop.scores.abs().max()))
        assert auto.provenance.engine == "ghost"

    recipe.at_scoring = compare
    with_whence = recipe.run(Chosen(keep_all))
    assert len(compared) == 1
    assert compared[0] <= 1e-5
    check_raw_advantages(recipe)
    own = recipe.train_without_whence()
    assert with_whence.keys() == own.keys()
    for key in own:
        assert torch.equal(with_whence[key], own[key]), key


def check_raw_advantages(recipe):
    advantages = recipe.records.advantages
    assert abs(advantages.mean()) > 1e-4 or abs(advantages.std() - 1) > 1e-2
    if recipe.name in ("skrl", "rsl_rl"):
        normalised = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        torch.testing.assert_close(normalised, recipe.live_advantages().flatten(), rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(recipe.records.returns - recipe.records.values, advantages, rtol=0, atol=1e-4)


# CleanRL's loop is the recipe's own, and shows it at the least cost.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cleanrl" else pytest.mark.long) for name in LIBRARIES]
)
def test_what_is_dropped_changes_nothing_and_what_is_kept_trains(recipe):
    def spoil(records, keep):
        for column in recipe.live_columns():
            flat = column if recipe.name == "rllib" else column.reshape(len(keep), -1)
            dropped = recipe.live_rows((~keep).nonzero().flatten())
            if isinstance(flat, np.ndarray) and flat.dtype.kind == "f":
                flat[dropped.numpy()] = np.nan
            elif isinstance(flat, torch.Tensor) and flat.is_floating_point():
                flat[dropped] = torch.nan

    untouched = recipe.run(Chosen(keep_three_of_four))
    spoiled = recipe.run(Chosen(keep_three_of_four, spoil))
    every = recipe.run(Chosen(keep_all))
    for key, parameter in untouched.items():
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, spoiled[key]), key
    assert any(not torch.equal(untouched[key], every[key]) for key in every)
    for position in (1, 511):

        def raise_advantage(records, keep, position=position):
            assert keep[position]
            recipe.live_advantages().reshape(-1)[recipe.live_rows(torch.tensor(position))] += 10

        raised = recipe.run(Chosen(keep_three_of_four, raise_advantage))
        assert any(not torch.equal(untouched[key], raised[key]) for key in untouched), position


def test_thousands_of_environments_train_as_without_whence(tmp_path, monkeypatch):
    module = script("ppo_isaac")

    def run(environments: Any = None) -> Any:
        torch.manual_seed(0)
        return module.main(rounds=2, num_envs=16, path=tmp_path / "run", environments=environments)

    recorded = run(tmp_path / "environments")
    learner, environments = (whence.open_run(tmp_path / name) for name in ("run", "environments"))
    for number in learner.rounds():
        one, other = (
            each.round("records", number).sort("env_index", "episode_id", "step") for each in (learner, environments)
        )
        for name in ("reward", "end", "info.tracking", "info.termination"):
            assert one[name].to_list() == other[name].to_list(), name
    assert learner.rounds() == environments.rounds() == [1, 2]
    monkeypatch.setattr(module, "Run", NoRun)
    plain = run()
    assert all(map(torch.equal, recorded.parameters(), plain.parameters()))
