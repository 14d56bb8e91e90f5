"""RecurrentPPO: scores against sb3-contrib's own loss, training with dropped records, and what is asked of its runs."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

import whence
from helpers import toys
from helpers.gradients import Gradients, fill_buffer
from whence.causes import compare_log_probs, find_causes, play_episode, prove, read_record
from whence.core import RunDirectoryError, as_view
from whence.sb3 import InfluenceCallback, collect, model_objective
from whence.sb3.rounds.sampling import select_from
from whence.stored.agents import compare_policies, estimate_advantages, load_agent, load_round, replay_episode

STEPS = 32


class Positions(gym.ObservationWrapper):
    """Observe a cart without its velocities."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]


def make_cart() -> Any:
    env = DummyVecEnv([lambda: Positions(gym.make("CartPole-v1", render_mode="rgb_array"))] * 2)
    env.seed(3)
    return env


def make_model(**settings: Any) -> RecurrentPPO:
    policy_kwargs = {"lstm_hidden_size": 8, "net_arch": [8]}
    fixed: Any = {"n_steps": STEPS, "batch_size": 24, "n_epochs": 2, "seed": 3, "device": "cpu"}
    return RecurrentPPO("MlpLstmPolicy", make_cart(), **fixed, **{"policy_kwargs": policy_kwargs, **settings})


def loss_scores(toy: Any, ent_coef: float) -> Any:
    """Return each record's product of gradients, those that sb3-contrib's `train()` takes on its masked loss."""
    buffer, optimizer = toy.rollout_buffer, Gradients(toy.policy.parameters())
    advantages = buffer.advantages.swapaxes(0, 1).reshape(-1, 1).copy()
    n = len(advantages)
    toy.normalize_advantage, toy.max_grad_norm, toy.vf_coef, toy.n_epochs = False, float("inf"), 0.0, 1
    toy.policy.optimizer, toy.ent_coef = optimizer, 0.0
    # A minibatch of the whole rollout, whose sequences begin with episodes and the rollout.
    next(iter(buffer.get(n)))  # brings the arrays into the order of the records
    change = np.zeros((buffer.n_envs, buffer.buffer_size), np.float32)
    change[:, 0] = 1
    samples = buffer._get_samples(np.arange(n), change.reshape(-1, 1))
    buffer.get = lambda batch_size: iter([samples])
    toy.train()
    buffer.advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    samples = samples._replace(advantages=buffer.pad_and_flatten(buffer.advantages))
    masks = [buffer.pad_and_flatten(row[:, None]) for row in np.eye(n, dtype=np.float32)]
    buffer.get = lambda batch_size: iter([samples._replace(mask=mask) for mask in masks])
    toy.ent_coef = ent_coef
    toy.train()
    target, *rows = [-torch.cat([g.flatten() for g in step]) for step in optimizer.steps]
    return torch.stack(rows) @ target


CASES: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared LSTM": {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}},
    "no critic LSTM": {"policy_kwargs": {"enable_critic_lstm": False}, "action": "box"},
    "two layers": {"policy_kwargs": {"n_lstm_layers": 2, "lstm_kwargs": {"bias": False}}, "shared": False},
    "dict": {"observation": "dict", "action": "multidiscrete"},
    "image": {"observation": "image"},
    "gsde": {"action": "gsde"},
    "replaced extractor": {},
}


class Halved(FlattenExtractor):
    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations) / 2


# A dict has an image, too, and test_sb3_loss.py the noise of gSDE.
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in ("image", "gsde") else ()) for case in CASES]
)
def test_scores_are_those_of_the_librarys_own_loss(case: str) -> None:
    toy = toys.model(RecurrentPPO, n_envs=2, n_steps=8, batch_size=8, **CASES[case])
    if case == "replaced extractor":
        toy.policy.features_extractor = Halved(toy.observation_space)
    collect(toy)  # so that sequences begin in states other than zeros
    toy.ent_coef = 0.01
    records = fill_buffer(toy, reset_num_timesteps=False)
    assert not records.episode_starts[records.env_index.diff(prepend=torch.tensor([-1])) != 0].all()
    view = as_view(toy.policy)
    outputs = view(view.parameters(), view.prepare(records))
    torch.testing.assert_close(outputs.log_prob, records.log_probs)
    torch.testing.assert_close(outputs.value, records.values)
    influence = whence.attribute(toy.policy, records, target=whence.Return(), objective=model_objective(toy))
    assert influence.engine == "forward"
    expected = loss_scores(toy, ent_coef=0.01)
    torch.testing.assert_close(influence.scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_parts_of_a_rollout_score_as_in_it() -> None:
    toy = make_model()
    records = collect(toy)
    state = records.take(slice(40, 41))
    settings: Any = {"target": whence.Action(state.observations, 1, records=state)}
    whole = whence.attribute(toy.policy, records, **settings, engine="loop").scores
    for engine in ("forward", "auto"):
        torch.testing.assert_close(whence.attribute(toy.policy, records, **settings, engine=engine).scores, whole)
    objective = whence.PPOClip(advantage_norm="none")
    whole, part = (
        whence.attribute(toy.policy, some, **settings, objective=objective).scores
        for some in (records, records.take(torch.tensor([50, 3, 17])))
    )
    torch.testing.assert_close(part, whole[[50, 3, 17]])


def test_recording_changes_nothing_and_dropping_masks_the_loss_alone(tmp_path: Path) -> None:
    plain = make_model().learn(2 * 2 * STEPS)
    recorded = make_model().learn(2 * 2 * STEPS, callback=InfluenceCallback(run=tmp_path / "run", folds=3))
    for name, tensor in plain.policy.state_dict().items():
        assert torch.equal(tensor, recorded.policy.state_dict()[name]), name

    keeps: list[Any] = []

    class Noting(InfluenceCallback):
        def select(self, records: Any, influence: Any) -> Any:
            selection = super().select(records, influence)
            keeps.append(selection.keep.numpy())
            return selection

    def mask(model: Any) -> None:
        buffer, keep = model.rollout_buffer, keeps.pop(0)

        def get_samples(indices: Any, change: Any) -> Any:
            samples = type(buffer)._get_samples(buffer, indices, change)
            return samples._replace(mask=buffer.pad_and_flatten(keep[indices, None].astype(np.float32)))

        buffer._get_samples = get_samples

    selected = make_model().learn(2 * 2 * STEPS, callback=Noting(whence.IIF(drop=0.5)))
    assert len(keeps) == 2
    assert not any(keep.all() for keep in keeps)
    masked = make_model().learn(2 * 2 * STEPS, callback=toys.OnRolloutEnd(mask))
    for name, tensor in masked.policy.state_dict().items():
        assert torch.equal(tensor, selected.policy.state_dict()[name]), name
        assert not tensor.numel() or not torch.equal(tensor, plain.policy.state_dict()[name]), name


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_minibatches_keep_two_records_each(last: Any) -> None:
    toy = make_model()
    records = fill_buffer(toy)
    for places in ([5, 40, 41], [0, 63], [10, 11, 12, 13, 14]):
        keep = torch.zeros(len(records), dtype=torch.bool)
        keep[places] = True
        selection = whence.Selection.dropping(keep, "not among them")
        with select_from(toy.rollout_buffer, selection, last=last):
            for _ in range(8):  # each begins at another record
                minibatches = list(toy.rollout_buffer.get(24))
                counts = [int(samples.mask.sum()) for samples in minibatches]
                assert min(counts) >= 2
                if last == "keep":
                    kept = torch.cat([samples.advantages[samples.mask > 0] for samples in minibatches])
                    assert sorted(kept.tolist()) == sorted(records.advantages[places].tolist())


@pytest.fixture(scope="module")
def cart(tmp_path_factory: pytest.TempPathFactory) -> whence.RunDirectory:
    path = tmp_path_factory.mktemp("recurrent") / "run"
    callback = InfluenceCallback(whence.IIF(drop=0.25), run=path, folds=None)  # errors take longer than all else
    make_model().learn(4 * 2 * STEPS, callback=callback)
    return whence.RunDirectory.open(path)


def test_a_stored_round_has_its_history(cart: whence.RunDirectory) -> None:
    table = cart.round("records", 3)
    model, records = load_round(cart, 3)
    assert any(tensor.any() for tensor in records.history.states.values())
    influence = whence.attribute(model.policy, records, target=whence.Return(), objective=model_objective(model))
    np.testing.assert_allclose(influence.scores, table["score"], rtol=1e-5, atol=1e-6)
    changes = compare_policies(cart, 3).sort("record_id")
    values = table.sort("record_id")["value"]
    np.testing.assert_allclose(changes["value_before"], values, rtol=1e-4, atol=1e-5)
    assert changes["divergence"].max() > 0


def test_what_taught_a_decision_is_told(cart: whence.RunDirectory) -> None:
    table = cart.round("records", 3)
    row = table.filter(pl.col("step") > 3).row(0, named=True)
    target = read_record(cart, 3, row["record_id"])
    model = load_agent(cart, 3)
    _, records = load_round(cart, 3)
    view = as_view(model.policy)
    log_prob = float(target(view, view.parameters(), records).detach())
    assert log_prob == pytest.approx(row["log_prob"], abs=1e-5)  # which its steps before give it
    assert len(compare_log_probs(cart, target)) == 3
    keys = pl.DataFrame({"round": [2, 3], "record_id": [cart.round("records", 2)["record_id"][0], row["record_id"]]})
    with pytest.raises(whence.WhenceError, match="flag those of one round"):
        find_causes(cart, keys)
    for method in ("influence", "nearest"):
        causes = find_causes(cart, target, rounds=[3], method=method)
        # A record that trains on the same action with an advantage speaks for it, if that is positive.
        own = causes.filter(pl.col("record_id") == row["record_id"]).row(0, named=True)
        assert own["score"] * row["advantage"] >= 0
        assert causes["score"].abs().max() > 0


def note_passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each step of a policy adds what it returns: actions, values, log-probs, states."""
    passes: list[Any] = []
    forward = RecurrentActorCriticPolicy.forward

    def note(self: Any, *args: Any, **options: Any) -> Any:
        passes.append(forward(self, *args, **options))
        return passes[-1]

    monkeypatch.setattr(RecurrentActorCriticPolicy, "forward", note)
    return passes


def test_an_episode_is_played_with_memory(cart: whence.RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = note_passes(monkeypatch)
    episode = play_episode(cart, seed=1)
    assert len(episode) == len(passes) > 3
    torch.testing.assert_close(episode.records.log_probs, torch.cat([log_prob for _, _, log_prob, _ in passes]))
    assert torch.equal(episode.records.actions, play_episode(cart, seed=1).records.actions)


@pytest.mark.parametrize("begun_before", [False, True])
def test_fresh_rollouts_go_on_in_the_memory_of_the_record(
    cart: whence.RunDirectory, monkeypatch: pytest.MonkeyPatch, begun_before: bool
) -> None:
    table = cart.round("records", 3).with_columns(begin=pl.col("step").min().over("episode_id"))
    fits = ((pl.col("begin") > 0) == begun_before) & (pl.col("step") - pl.col("begin") > 2)
    row = table.filter(fits).row(0, named=True)
    replay = replay_episode(cart, row["episode_id"], last_step=row["step"])
    assert replay.mismatch is None
    passes = note_passes(monkeypatch)
    estimates = estimate_advantages(cart, 3, [row["record_id"]], continuations=2)
    assert estimates["mc_error"].is_finite().all()
    # The value of the record's state, which the policy read after the steps before it.
    values = passes[row["step"] - row["begin"]][1].flatten()
    np.testing.assert_allclose(values, [row["value"]] * 4, rtol=1e-4, atol=1e-5)


def test_actions_of_a_squashing_policy_are_those_that_were_taken(tmp_path: Path) -> None:
    env = DummyVecEnv([lambda: gym.make("Pendulum-v1")])
    settings: Any = {"n_steps": 32, "use_sde": True, "policy_kwargs": {"squash_output": True, "lstm_hidden_size": 8}}
    model = RecurrentPPO("MlpLstmPolicy", env, batch_size=32, n_epochs=1, seed=3, device="cpu", **settings)
    model.learn(32, callback=InfluenceCallback(run=tmp_path / "run"))
    run = whence.RunDirectory.open(tmp_path / "run")
    record, episode = run.round("records", 1).select("record_id", "episode_id").row(9)
    assert replay_episode(run, episode).mismatch is None
    assert estimate_advantages(run, 1, [record], continuations=2)["mc_error"].is_finite().all()


def test_page_and_findings(cart: whence.RunDirectory, whence: Any, tmp_path: Path) -> None:
    assert whence("findings", str(cart.path))[0] == 0
    code, _, errors = whence("report", str(cart.path), "--out", str(tmp_path / "page.html"))
    assert code == 0, errors
    assert whence("attribute", str(cart.path), "--round", "2")[0] == 0
    record = str(cart.round("records", 2)["record_id"][9])
    assert whence("why", str(cart.path), "--record", record, "--by", "influence")[0] == 0
    code, _, errors = whence("why", str(cart.path), "--observation", "[0.1, 0.1]", "--action", "1")
    assert code == 2
    assert "whence why RUN --record N" in errors


class Other(RecurrentActorCriticPolicy):
    def evaluate_actions(self, *args: Any) -> Any:
        return super().evaluate_actions(*args)


def test_what_cannot_be_done_is_refused_before(cart: whence.RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(whence.Unsupported, match="cannot be recorded"):
        make_model().learn(64, callback=InfluenceCallback(recordings=[1]))
    with pytest.raises(whence.Unsupported, match=r"overrides evaluate_actions\(\).*MlpLstmPolicy"):
        RecurrentPPO(Other, make_cart(), device="cpu").learn(64, callback=InfluenceCallback())
    kwargs = {"policy_kwargs": {"lstm_kwargs": {"proj_size": 4}, "lstm_hidden_size": 8}}
    with pytest.raises(whence.Unsupported, match="Leave out proj_size"):
        make_model(**kwargs).learn(64, callback=InfluenceCallback())
    with pytest.raises(RunDirectoryError, match="trained a recurrent policy"):
        prove(cart, read_record(cart, 2, int(cart.round("records", 2)["record_id"][0])))
    toy = make_model()
    records, others = collect(toy), collect(toy)
    with pytest.raises(whence.WhenceError, match="have no history"):
        whence.attribute(toy.policy, records.with_columns({"history": None}), target=whence.Return())
    for changed in ({"history": others.history}, {"observations": others.observations}):
        with pytest.raises(whence.WhenceError, match="not in the history"):
            whence.attribute(toy.policy, records.with_columns(changed), target=whence.Return())
