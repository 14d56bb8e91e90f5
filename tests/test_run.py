"""`whence.Run`: what any loop's learner writes is what was scored, and commands read it as a training's run."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from typer.testing import CliRunner

import whence
from helpers.toys import copy_signed
from whence.cli.app import app
from whence.core import InvalidRecords, RunDirectoryError, Unsupported, WhenceError
from whence.page.content.explored_run import ExploredRun
from whence.runs import RunDirectory

STEPS, ENVS = 32, 3
OBJECTIVE = whence.PPOClip(ent_coef=0.01)
CALLS = list[str]()


def make_actor(seed: int = 0, width: int = 4) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    actor = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, 3))
    for parameter in actor.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return actor.eval()


def read_actor(actor: Any, inputs: Any) -> whence.Outputs:
    policy = Categorical(logits=actor(inputs["observations"]))
    return whence.Outputs(policy.log_prob(inputs["actions"]), entropy=policy.entropy())


def make_policy() -> whence.PolicyView:
    CALLS.append("make_policy")
    return whence.ModuleView(make_actor(seed=9), read_actor)


def collect(actor: nn.Module, seed: int, *, width: int = 2, **columns: Any) -> whence.RecordBatch:
    generator = torch.Generator().manual_seed(seed)
    observations = torch.randn(STEPS, ENVS, width, generator=generator)
    actions = torch.randint(3, (STEPS, ENVS), generator=generator)
    with torch.no_grad():
        logits = actor(observations[..., :2].flatten(0, 1)).reshape(STEPS, ENVS, 3)
    return whence.RecordBatch.from_rollout(
        observations=observations,
        actions=actions,
        log_probs=Categorical(logits=logits).log_prob(actions),
        advantages=torch.randn(STEPS, ENVS, generator=generator),
        rewards=torch.randn(STEPS, ENVS, generator=generator),
        **columns,
    )


def draw_ends(seed: int) -> tuple[Tensor, Tensor]:
    terminated, truncated = torch.rand(2, STEPS, ENVS, generator=torch.Generator().manual_seed(seed)) < 0.07
    return terminated, truncated & ~terminated


def optimise(actor: nn.Module, records: whence.RecordBatch, keep: Tensor) -> None:
    kept = records.take(keep)
    view = whence.ModuleView(actor, read_actor)
    outputs = view(view.parameters(), view.prepare(kept))
    (-(outputs.log_prob * kept.advantages).mean()).backward()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def begin(path: Path, rule: Any = None, **settings: Any) -> whence.Run:
    policy = f"{__name__}:make_policy"
    return whence.Run(path, rule, **{"objective": OBJECTIVE, "policy": policy, "env": "Walk-v0", **settings})


def train(path: Path, rounds: int = 3, rule: Any = None) -> list[tuple[whence.RecordBatch, whence.Influence]]:
    """Return, for each round, the records and what `attribute` says of them before the optimisation."""
    actor, scored = make_actor(), []
    run = begin(path, rule)
    for seed in range(rounds):
        records, ends = collect(actor, seed), draw_ends(seed)
        view = whence.ModuleView(actor, read_actor)
        scored.append((records, whence.attribute(view, records, target=whence.Return(), objective=OBJECTIVE)))
        result = run.write_round(view, records, ends=ends, remaining=1 - seed / rounds)
        optimise(actor, records, result.selection.keep)
        run.write_metrics({"train/loss": float(seed)})
    run.close()
    return scored


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, Any]:
    path = tmp_path_factory.mktemp("loops") / "run"
    scored = train(path, rule=whence.IIF(drop=0.25))
    return RunDirectory.open(path), scored


def test_what_is_written_is_what_was_scored_and_selected(trained: Any) -> None:
    run, scored = trained
    metrics = run.table("metrics")
    assert metrics["round"].to_list() == [1, 2, 3]
    assert metrics["timestep"].to_list() == [96, 192, 288]
    assert metrics["train/loss"].to_list() == [0, 1, 2]
    assert set(run.table("timings").columns) >= {"scoring_wall", "errors_wall"}
    for number, (records, influence) in enumerate(scored, 1):
        table = run.round("records", number)
        assert table["record_id"].to_list() == [*range(96 * (number - 1), 96 * number)]
        np.testing.assert_array_equal(table["score"].to_numpy(), influence.scores.numpy())
        assert table["error"].null_count() == 0
        np.testing.assert_array_equal(table["observation"].to_numpy(), records.observations.numpy())
        selection = whence.IIF(drop=0.25).select(records, influence, whence.Progress(number))
        assert table["keep"].to_list() == selection.keep.tolist()
        assert table["reason"].to_list() == list(selection.reasons)
        assert metrics["kept"][number - 1] == int(selection.keep.sum()) < 96
        negative = float((influence.scores < 0).double().mean())
        assert metrics["negative_share"][number - 1] == pytest.approx(negative)
        # The policy is the one that was scored, before it was optimised.
        assert torch.equal(run.policy(number)["0.weight"], run.policy(1)["0.weight"]) == (number == 1)
    assert {*run.policy(1)} == {*make_actor().state_dict()}
    for name, tensor in make_actor().state_dict().items():
        assert torch.equal(run.policy(1)[name], tensor)
    assert run.rounds("policies") == [1, 2, 3, 4]  # the last one is the trained policy


def test_without_a_rule_all_records_are_scored_and_kept(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    table = RunDirectory.open(tmp_path / "run").round("records", 1)
    assert table["keep"].all()
    assert (table["score"] != 0).any()


@pytest.mark.parametrize("known", ["ends", "starts"])
def test_episodes_and_their_returns_go_through_rounds(tmp_path: Path, known: str) -> None:
    run, actor, rewards, ends = begin(tmp_path / "run"), make_actor(), [], []
    before = torch.ones(1, ENVS, dtype=torch.bool)
    for seed in range(3):
        done = torch.stack(draw_ends(seed)).any(dim=0)
        starts, before = torch.cat([before, done[:-1]]), done[-1:]
        columns = {} if known == "ends" else {"episode_starts": starts}
        records = collect(actor, seed, **columns)
        shown = draw_ends(seed) if known == "ends" else None
        run.write_round(whence.ModuleView(actor, read_actor), records, ends=shown)
        rewards.append(records.rewards.reshape(STEPS, ENVS))
        ends.append(done)
    run.close()
    directory = RunDirectory.open(tmp_path / "run")
    table = directory.scan().collect()
    assert ("end" in table.columns) == (known == "ends")
    returns, ids = [], set()
    for env, (paid, ended) in enumerate(zip(torch.cat(rewards).T, torch.cat(ends).T, strict=True)):
        mine = table.filter(pl.col("env_index") == env)
        step, total = 0, 0.0
        for place in range(3 * STEPS):
            assert mine["step"][place] == step
            assert mine["episode_start"][place] == (step == 0)
            ids.add((env, mine["episode_id"][place]))
            step, total = step + 1, total + float(paid[place])
            if ended[place]:
                # Whether the very last step of the run ended an episode is seen by `ends` alone.
                returns += [total] if known == "ends" or place < 3 * STEPS - 1 else []
                step, total = 0, 0.0
    assert len(ids) == len({episode for _, episode in ids}) == int(table["episode_start"].sum())
    assert directory.table("metrics")["episode_return"][-1] == pytest.approx(np.mean(returns), abs=1e-5)


def test_further_numbers_are_stored_by_name(tmp_path: Path) -> None:
    run, actor = whence.Run(tmp_path / "run", whence.KeepAll()), make_actor()
    view = whence.ModuleView(actor, read_actor)
    terms = {"goal": torch.randn(STEPS, ENVS), "hit": np.arange(STEPS * ENVS) % 7 == 0}
    with pytest.raises(InvalidRecords, match=r"infos\['goal'\] holds 95 numbers for 96 records"):
        run.write_round(view, collect(actor, 0), infos={"goal": np.zeros(95)})
    result = run.write_round(view, collect(actor, 0), infos=terms)
    run.close()
    table = whence.open_run(tmp_path / "run").round("records", 1)
    assert np.array_equal(table["info.goal"], terms["goal"].flatten())
    assert table["info.hit"].to_list() == terms["hit"].tolist()
    assert result.influence is None  # KeepAll() scores nothing
    assert "score" not in table.columns
    (note,) = ExploredRun(tmp_path / "run").round(1).notes
    assert "names no policy" in note  # and not that it was recorded around its environments


def test_findings_look_at_episodes_whose_beginning_was_not_seen(tmp_path: Path) -> None:
    run, starts = begin(tmp_path / "run"), torch.zeros(STEPS, ENVS, dtype=torch.bool)
    starts[10], starts[25] = True, True
    records = collect(make_actor(), 0, episode_starts=starts)
    run.write_round(view(), records, ends=(starts.roll(-1, 0), torch.zeros_like(starts)))
    run.close()
    table = RunDirectory.open(tmp_path / "run").round("records", 1)
    assert table["step"].null_count() == table["episode_id"].null_count() == 10 * ENVS
    assert {check.name: check.outcome for check in whence.inspect(tmp_path / "run")}["fixed length as end"] == "fine"


def test_a_second_start_adds_rounds_and_another_loop_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 1)
    run = RunDirectory.open(tmp_path / "run")
    assert run.table("metrics")["round"].to_list() == [1, 2, 3]
    assert run.table("metrics")["timestep"].to_list() == [96, 192, 288]
    table = run.scan().collect()
    assert table["record_id"].to_list() == [*range(288)]
    began = table.filter("episode_start")
    assert began["episode_id"].n_unique() == len(began)
    assert len(run.notes["resumed"]) == 1
    with pytest.raises(RunDirectoryError, match="another configuration"):
        train(tmp_path / "run", 1, whence.IIF(drop=0.5))
    with pytest.raises(RunDirectoryError, match="another configuration"):
        begin(tmp_path / "run", objective=whence.PPOClip())
    begin(tmp_path / "run", objective=whence.PPOClip(), overwrite=True).close()
    train(tmp_path / "new", 1)


WRITES = ("write_policy", "write_round", "append")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the disk holds when a file of round 2 was just written, which is what a kill leaves, by what wrote it."""
    path = tmp_path_factory.mktemp("killed")

    def copy_after(write: str) -> Any:
        whole = getattr(RunDirectory, write)

        def copy(self: RunDirectory, *arguments: Any, **options: Any) -> None:
            whole(self, *arguments, **options)
            number = arguments[1]["round"] if write == "append" else arguments[write == "write_round"]
            if number == 2 and not (path / write).exists():
                copy_signed(self.path, path / write)

        return copy

    with pytest.MonkeyPatch.context() as patch:
        for write in WRITES:
            patch.setattr(RunDirectory, write, copy_after(write))
        train(path / "alive", 2)
    return path


@pytest.mark.parametrize("write", WRITES)
def test_after_a_kill_files_are_whole_and_the_round_is_written_again(killed: Path, write: str) -> None:
    path = killed / write
    run = RunDirectory.open(path)
    done = 1 + (write == "append")
    assert run.table("metrics")["round"].to_list() == [*range(1, done + 1)]
    assert [run.round("records", number).height for number in range(1, done + 1)] == [STEPS * ENVS] * done
    assert 2 in run.rounds("policies")
    train(path, 1)
    run = RunDirectory.open(path)
    assert run.table("metrics")["round"].to_list() == [*range(1, done + 2)]
    assert run.scan().collect()["record_id"].to_list() == [*range((done + 1) * STEPS * ENVS)]


def read_and_draw(actor: Any, inputs: Any) -> whence.Outputs:
    """Read an actor as some libraries do: they draw an action, too, and keep it."""
    actor.drawn = torch.rand(1)
    return read_actor(actor, inputs)


def test_writing_changes_nothing_of_the_policy_and_the_generators(tmp_path: Path) -> None:
    actor = make_actor()
    actor[1].train()
    modes = [module.training for module in actor.modules()]
    actor[0].weight.grad = torch.ones_like(actor[0].weight)
    records, run = collect(make_actor(), 0), begin(tmp_path / "run", whence.IIF(drop=0.25))
    tensors = {name: tensor.clone() for name, tensor in actor.state_dict().items()}
    attributes = {name: sorted(vars(module)) for name, module in actor.named_modules()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    run.write_round(whence.ModuleView(actor, read_and_draw), records, ends=draw_ends(0))
    run.close()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in actor.state_dict().items())
    assert attributes == {name: sorted(vars(module)) for name, module in actor.named_modules()}
    assert torch.equal(actor[0].weight.grad, torch.ones_like(actor[0].weight))
    assert [parameter.grad is None for parameter in actor.parameters()] == [False] + [True] * 5
    assert modes == [module.training for module in actor.modules()]
    assert all(parameter.requires_grad for parameter in actor.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


class Halves:
    """A rule whose selection has half of the entries."""

    needs_influence = False

    def select(self, records: Any, influence: Any, progress: Any) -> whence.Selection:
        return whence.Selection.dropping(torch.ones(len(records) // 2, dtype=torch.bool), "")


BAD = {
    "policy of another shape": (lambda run: (view(make_actor(width=5)), collect(make_actor(), 1)), InvalidRecords),
    "observations of another shape": (lambda run: (view(), collect(make_actor(), 1, width=3)), InvalidRecords),
    "not a view": (lambda run: (make_actor(), collect(make_actor(), 1)), Unsupported),
    "no records": (lambda run: (view(), {"observations": [1]}), InvalidRecords),
}


def view(actor: nn.Module | None = None) -> whence.ModuleView:
    return whence.ModuleView(actor or make_actor(), read_actor)


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_the_run_is_refused_before_anything_is_written(tmp_path: Path, bad: str) -> None:
    make, error = BAD[bad]
    run = begin(tmp_path / "run")
    run.write_round(view(), collect(make_actor(), 0))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    policy, records = make(run)
    with pytest.raises(error):
        run.write_round(policy, records)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    run.close()
    if bad.endswith("shape"):  # a second start looks, too
        run = begin(tmp_path / "run")
        with pytest.raises(error, match="so far"):
            run.write_round(policy, records)
        run.close()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(WhenceError, match="module:function"):
        begin(tmp_path / "run", policy="helpers")
    with pytest.raises(WhenceError, match="rule"):
        begin(tmp_path / "run", whence.IIF)
    run = begin(tmp_path / "run", Halves())
    with pytest.raises(WhenceError, match="write_round"):
        run.write_metrics({"loss": 1.0})
    with pytest.raises(InvalidRecords, match="ends"):
        run.write_round(view(), collect(make_actor(), 0), ends=(torch.zeros(5), torch.zeros(5)))
    with pytest.raises(WhenceError, match="48 records"):
        run.write_round(view(), collect(make_actor(), 0))
    assert RunDirectory.open(tmp_path / "run").rounds() == []
    run.close()
    run = begin(tmp_path / "good")
    run.write_round(view(), collect(make_actor(), 0))
    with pytest.raises(WhenceError, match="timestep"):
        run.write_metrics({"timestep": 3.0})
    run.close()


def call(*arguments: Any, code: int = 0) -> Any:
    """Return what a command prints, as data if it is."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)
    if code:
        assert isinstance(result.exception, WhenceError), result.output
        return str(result.exception)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def test_commands_read_the_run(trained: Any, tmp_path: Path) -> None:
    run, _ = trained
    assert "findings" in call("findings", run.path, "--json")
    checks = {check.name: check.outcome for check in whence.inspect(run)}
    assert checks["short episodes"] != "could not be looked at"
    moment = call("show", run.path, "--record", 100, "--json")["moment"]
    stored = run.round("records", 2).row(4, named=True)
    assert moment["score"] == pytest.approx(stored["score"], abs=1e-5)
    assert moment["end"] == stored["end"]
    assert "whence.Run" in moment["mc_text"]
    call("report", run.path, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 100_000
    call("attribute", run.path, "--round", 2, "--out", tmp_path / "scores.parquet")
    anew, before = pl.read_parquet(tmp_path / "scores.parquet"), run.round("records", 2)
    for name in ("score", "error"):
        np.testing.assert_allclose(anew[name].to_numpy(), before[name].to_numpy(), atol=1e-6)


@pytest.mark.parametrize("by", ["influence", "nearest"])
def test_why_scores_all_rounds_at_their_policies(trained: Any, by: str) -> None:
    run, _ = trained
    why = call("why", run.path, "--record", 100, "--by", by, "--json")
    assert why["rounds"] == [1, 2, 3]
    assert why["raised"]
    assert why["lowered"]
    row = run.round("records", 2).row(4, named=True)
    target = whence.Action(np.array(row["observation"]), row["action"])
    total = 0.0
    for number in (1, 2, 3):
        policy = make_policy()
        policy.module.load_state_dict(run.policy(number))
        table = run.round("records", number)
        records = whence.RecordBatch.from_polars(table)
        scores = whence.attribute(policy, records, target=target, objective=OBJECTIVE).scores.double().numpy()
        scores = scores * whence.selection.read_weights(table)
        total += scores[scores > 0].sum()
        if number == 1:
            with torch.no_grad():
                logits = policy.module(torch.tensor(row["observation"])[None])
            first = Categorical(logits=logits).log_prob(torch.tensor(row["action"]))
            assert why["log_prob_first"] == pytest.approx(float(first), abs=1e-5)
    if by == "influence":
        assert why["total"]["raised"] == pytest.approx(total, rel=1e-4)


def test_what_needs_the_loop_is_refused_in_a_sentence(trained: Any) -> None:
    run, _ = trained
    CALLS.clear()
    assert "train its rounds again" in call("prove", run.path, "--record", 100, code=2)
    assert CALLS == []  # nothing was computed before
    with pytest.raises(RunDirectoryError, match="train its rounds again"):
        whence.causes.prove(run, whence.Action(np.zeros(2, np.float32), 1), seeds=1)
    assert "play an episode" in call("why", run.path, code=2)


def test_a_strangers_function_is_called_with_trust_alone(trained: Any, tmp_path: Path) -> None:
    run, _ = trained
    shutil.copytree(run.path, tmp_path / "copy")
    CALLS.clear()
    assert "--trust" in call("attribute", tmp_path / "copy", code=2)
    call("show", tmp_path / "copy", "--json")
    call("report", tmp_path / "copy", "--out", tmp_path / "page.html")
    assert CALLS == []
    call("attribute", tmp_path / "copy", "--trust")
    assert CALLS == ["make_policy"]


def make_nothing() -> None:
    return None


class Steeper(whence.PPOClip):
    """An objective of the user's."""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": None}, "names no policy"),
        ({"policy": "no_such_module:make"}, "no_such_module"),
        ({"policy": f"{__name__}:make_nothing"}, "PolicyView"),
        ({"objective": Steeper()}, "Steeper"),
    ],
)
def test_a_policy_that_cannot_be_asked_again_is_refused(tmp_path: Path, settings: Any, reason: str) -> None:
    run = begin(tmp_path / "run", **settings)
    run.write_round(view(), collect(make_actor(), 0))
    run.close()
    assert reason in call("attribute", tmp_path / "run", code=2)
    call("show", tmp_path / "run")


def read_gaussian(actor: Any, inputs: Any) -> Tensor:
    means = actor(torch.cat([inputs["observations"]["x"].flatten(1), inputs["observations"]["y"]], dim=1))
    return Normal(means, 1.0).log_prob(inputs["actions"]).sum(dim=1)


def make_gaussian() -> whence.PolicyView:
    torch.manual_seed(0)
    return whence.ModuleView(nn.Linear(5, 1), read_gaussian)


def test_dict_observations_and_continuous_actions_keep_their_shapes(tmp_path: Path) -> None:
    run = whence.Run(tmp_path / "run", policy=f"{__name__}:make_gaussian")
    policy, generator = make_gaussian(), torch.Generator().manual_seed(0)
    x, y, actions = (torch.randn(40, *shape, generator=generator) for shape in ((2, 2), (1,), (1,)))
    columns = {"observations": {"x": x, "y": y}, "actions": actions}
    with torch.no_grad():
        log_probs = read_gaussian(policy.module, columns)
    records = whence.RecordBatch(**columns, log_probs=log_probs, advantages=torch.randn(40, generator=generator))
    run.write_round(policy, records)
    run.close()
    _, again = whence.stored.load_round(RunDirectory.open(tmp_path / "run"), 1)
    assert torch.equal(again.observations["x"], x)
    assert torch.equal(again.observations["y"], y)
    assert torch.equal(again.actions, actions)
    assert "log-density" in call("why", tmp_path / "run", "--record", 3)
