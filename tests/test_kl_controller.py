"""The controller of the learning rate: what it measures, what it sets, and what it leaves as it was."""

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from toys import Toy, model
from whence import IIF, KeepAll, RunDirectory, Selection, Unsupported, WhenceError
from whence.errors import RunDirectoryError
from whence.experiments import RunConfig, run
from whence.guards import read_rng_state
from whence.sb3 import InfluenceCallback, KLController, resume
from whence.sb3.divergence import measure_divergence
from whence.sb3.kl_controller import choose_factor, choose_step_factor
from whence.sb3.train_hook import original_class

STEPS = 32


class Watch(BaseCallback):
    """Record the learning rate and the divergence of each round's training, and of each step's."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.divergences: list[float] = []
        self.steps: list[list[float]] = []

    def _on_training_start(self) -> None:
        optimizer = self.model.policy.optimizer
        optimizer.register_step_post_hook(lambda *_: self.steps[-1].append(optimizer.param_groups[0]["lr"]))

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.steps.append([])

    def _on_rollout_start(self) -> None:
        self._read()

    def _on_training_end(self) -> None:
        self._read()

    def _read(self) -> None:
        logged = self.model.logger.name_to_value
        if "train/kl" in logged:
            self.rates.append(logged["train/learning_rate"])
            self.divergences.append(logged["train/kl"])


class Interrupt(BaseCallback):
    """Raise KeyboardInterrupt at a time step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.at:
            raise KeyboardInterrupt
        return True


def parameters(toy: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in toy.policy.parameters()])


def test_factor_after_a_round():
    assert choose_factor(0.01, 0.01) == 1
    assert choose_factor(0.0121, 0.01) == pytest.approx(1 / 1.1)
    assert choose_factor(0.01, 0.0144) == pytest.approx(1.2)
    assert choose_factor(10.0, 0.01) == choose_factor(math.inf, 0.01) == choose_factor(math.nan, 0.01) == 1 / 1.5
    assert choose_factor(1e-9, 0.01) == choose_factor(0.0, 0.01) == choose_factor(-1e-12, 0.01) == 1.5


def test_factor_before_a_step():
    assert choose_step_factor(0.0201, 0.01) == choose_step_factor(math.nan, 0.01) == 1 / 1.5
    assert choose_step_factor(0.02, 0.01) == choose_step_factor(0.01, 0.01) == choose_step_factor(0.005, 0.01) == 1
    assert choose_step_factor(0.0049, 0.01) == choose_step_factor(0.0, 0.01) == 1.5


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (PPO, {}),
        (PPO, {"observation": "dict", "n_envs": 3}),
        (PPO, {"observation": "discrete"}),
        (PPO, {"action": "box"}),
        (PPO, {"action": "squashed"}),
        (PPO, {"action": "multibinary"}),
        (A2C, {"action": "multidiscrete"}),
        (MaskablePPO, {"observation": "image"}),
        (MaskablePPO, {"action": "multidiscrete", "n_envs": 2}),
    ],
)
def test_divergence_is_that_of_each_record_in_turn(algorithm, settings):
    toy = model(algorithm, **settings)
    toy.learn(STEPS * toy.n_envs)
    buffer = toy.rollout_buffer
    before = read_rng_state()
    by_record = []
    for position in range(STEPS * toy.n_envs):
        samples = buffer._get_samples(np.array([position]))
        actions = samples.actions.long().flatten() if settings.get("action") is None else samples.actions
        masks = {"action_masks": samples.action_masks} if algorithm is MaskablePPO else {}
        log_prob = toy.policy.evaluate_actions(samples.observations, actions, **masks)[1]
        log_ratio = float(log_prob.detach()) - float(samples.old_log_prob)
        by_record.append(math.exp(log_ratio) - 1 - log_ratio)
    toy.policy.train()
    assert measure_divergence(toy) == pytest.approx(np.mean(by_record), rel=1e-4, abs=1e-9)
    assert np.mean(by_record) > 1e-6
    assert toy.policy.training
    assert str(read_rng_state()) == str(before)


@pytest.mark.parametrize("learning_rate", [2e-5, 2e-2])
def test_rounds_reach_the_target_from_any_rate(learning_rate):
    target, watch = 0.005, Watch()
    env = gym.make("CartPole-v1")
    ppo = PPO("MlpPolicy", env, learning_rate=learning_rate, n_steps=128, batch_size=64, n_epochs=4, seed=0)
    ppo.learn(45 * 128, callback=[KLController(target, bounds=(1e-6, 1.0)), watch])
    late = watch.divergences[20:]
    assert len(late) == 25
    assert target / 1.5 < np.median(late) < 1.5 * target
    assert not target / 1.5 < watch.divergences[0] < 1.5 * target
    for rate, following, kl in zip(watch.rates, watch.rates[1:], watch.divergences, strict=False):
        assert following == pytest.approx(rate * choose_factor(kl, target), rel=1e-12)


@pytest.mark.parametrize(
    ("divergences", "times"), [([0.001] * 6 + [0.02] + [0.001] * 6, 1), ([0.001] * 4 + [0.02] + [0.001] * 4, 0)]
)
def test_a_target_out_of_reach_is_told_once(caplog, monkeypatch, divergences, times):
    values = iter(divergences)
    monkeypatch.setattr("whence.sb3.kl_controller.measure_divergence", lambda model: next(values))
    model(learning_rate=1e-3).learn(len(divergences) * STEPS, callback=KLController(0.01, bounds=(1e-3, 1e-3)))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == times
    for text in messages:
        assert text.startswith("The learning rate is at its bound of 0.001, and a round still takes the policy less")
        assert "0.001 nats, the mean of 5 rounds" in text
        assert "choose a target of about 0.001. Else raise `bounds`" in text


def test_a_scale_of_one_is_the_models_own_training():
    plain = model(learning_rate=0.007)
    plain.learn(4 * STEPS)
    controller, steered = KLController(0.01, bounds=(0.007, 0.007)), model(learning_rate=0.007)
    steered.learn(4 * STEPS, callback=controller)
    assert parameters(plain).equal(parameters(steered))
    assert controller.scale == 1


def test_keeping_all_with_it_is_ppo_with_it():
    def train(*callbacks: BaseCallback) -> torch.Tensor:
        toy = model()
        toy.learn(5 * STEPS, callback=list(callbacks))
        return parameters(toy)

    plain = train(KLController(0.003))
    assert plain.equal(train(InfluenceCallback(KeepAll()), KLController(0.003)))
    assert plain.equal(train(KLController(0.003), InfluenceCallback(KeepAll())))
    assert not plain.equal(train())


def test_a_schedule_is_scaled():
    watch, controller = Watch(), KLController(1e9)  # every round multiplies by 1.5, up to ten times the start's
    toy = model(learning_rate=lambda remaining: 1e-4 * remaining)
    schedule = toy.lr_schedule
    toy.learn(12 * STEPS, callback=[controller, watch])
    progress = [1 - number / 12 for number in range(1, 13)]
    expected = [1e-4 * left * min(1.5**number, 10) for number, left in enumerate(progress)]
    assert watch.rates == pytest.approx(expected)  # the last is 0, the schedule's end
    assert toy.lr_schedule is schedule


def test_a_schedule_that_falls_below_the_bounds_leaves_the_scale():
    controller, watch = KLController(1e-9), Watch()  # every round divides by 1.5, down to a tenth of the start's
    toy = model(learning_rate=lambda remaining: 1e-2 * remaining)
    toy.learn(8 * STEPS, callback=[controller, watch])
    assert controller.scale == pytest.approx(0.1)
    assert watch.rates[-2] == pytest.approx(1e-2 * (1 / 8) * 0.1)
    toy.learn(2 * STEPS, callback=[controller, watch])
    assert watch.rates[8] == pytest.approx(1e-2 * 0.5 * 0.1)  # the same model goes on with the scale


def test_a_changed_rate_stays_within_the_bounds():
    controller, watch = KLController(1e9, bounds=(1e-4, 1e-2)), Watch()
    toy = model(learning_rate=1e-3)
    toy.learn(8 * STEPS, callback=controller)
    assert controller.scale == pytest.approx(10)
    toy.lr_schedule = lambda remaining: 5e-3
    toy.learn(2 * STEPS, callback=[controller, watch])
    assert watch.rates == pytest.approx([1e-2, 1e-2])


def test_another_model_starts_at_its_own_rate():
    controller, watch = KLController(1e9), Watch()
    model(learning_rate=1e-3).learn(2 * STEPS, callback=controller)
    assert controller.scale == pytest.approx(1.5**2)
    model(learning_rate=1e-3).learn(2 * STEPS, callback=[controller, watch])
    assert watch.rates == pytest.approx([1e-3, 1.5e-3])


def test_steps_are_steered_as_rsl_rl_does():
    watch = Watch()
    toy = model(n_steps=64, batch_size=16, learning_rate=1e-3)
    toy.learn(2 * 64, callback=[KLController(1e9, every="minibatch"), watch])
    first, second = watch.steps
    assert first == pytest.approx(
        [min(1e-3 * 1.5**step, 1e-2) for step in range(8)]
    )  # the first step's rate is the schedule's
    assert second[0] == pytest.approx(first[-1])
    assert second[1] == pytest.approx(1e-2)
    down = Watch()
    toy = model(n_steps=64, batch_size=16, learning_rate=1e-3)
    toy.learn(64, callback=[KLController(1e-9, every="minibatch"), down])
    assert down.steps[0] == pytest.approx([max(1e-3 / 1.5**step, 1e-4) for step in range(8)])


def test_skipped_rounds_change_nothing():
    class Nothing:
        needs_influence = False

        def select(self, records, influence, progress):
            return Selection.dropping(torch.zeros(len(records), dtype=torch.bool), "all")

    toy, controller = model(), KLController()
    toy.learn(2 * STEPS, callback=[InfluenceCallback(Nothing()), controller])
    assert controller.scale == 1


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("every", ["round", "minibatch"])
def test_an_interrupted_training_goes_on_at_its_scale(tmp_path, every, order):
    def train(name: str, *more: BaseCallback) -> Any:
        toy = model()
        steering = [
            InfluenceCallback(IIF(0.5), run=tmp_path / name, save_every=1),
            KLController(0.002, every=every, bounds=(1e-6, 1.0)),
        ]
        toy.learn(6 * STEPS, callback=[*steering[::order], *more])
        return toy

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("cut", Interrupt(at=4 * STEPS + 5))
    cut = train("cut")
    assert parameters(whole).equal(parameters(cut))
    one, other = (RunDirectory.open(tmp_path / name) for name in ("whole", "cut"))
    assert one.table("metrics").equals(other.table("metrics"))
    assert one.table("metrics")["train/kl"].null_count() == 0
    assert one.table("metrics")["train/learning_rate"].n_unique() > 3
    assert one.notes["kl_controller"] == repr(KLController(0.002, every=every, bounds=(1e-6, 1.0)))


def test_a_run_goes_on_with_its_own_controller_only(tmp_path):
    def start(path: Path, *callbacks: BaseCallback) -> None:
        model().learn(3 * STEPS, callback=[InfluenceCallback(KeepAll(), run=path, save_every=1), *callbacks])

    for name, callbacks in (("steered", [KLController(0.002)]), ("plain", [])):
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / name, *callbacks, Interrupt(at=STEPS + 5))
    with pytest.raises(RunDirectoryError, match=r"with KLController\(0.002\), and this .* has none. Pass"):
        start(tmp_path / "steered")
    with pytest.raises(RunDirectoryError, match=r"has KLController\(0.003\). Pass KLController\(0.002\)"):
        start(tmp_path / "steered", KLController(0.003))
    with pytest.raises(RunDirectoryError, match=r"with no KLController, .*\(0.003\). Leave it out"):
        start(tmp_path / "plain", KLController(0.003))
    toy, callback = resume(tmp_path / "steered", model().get_env(), rule=KeepAll())
    toy.learn(3 * STEPS, callback=[callback, KLController(0.002)])
    assert RunDirectory.open(tmp_path / "steered").table("metrics").height == 3


def test_an_interrupted_training_leaves_the_models_own_rate():
    class InterruptStep(BaseCallback):
        """Raise KeyboardInterrupt inside of the second round's training."""

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            if self.num_timesteps > STEPS:
                self.model.policy.optimizer.register_step_pre_hook(self.interrupt)

        def interrupt(self, *_: Any) -> None:
            raise KeyboardInterrupt

    toy, controller = model(), KLController(1e9)
    schedule = toy.lr_schedule
    with pytest.raises(KeyboardInterrupt):
        toy.learn(4 * STEPS, callback=[controller, InterruptStep()])
    assert controller.scale == pytest.approx(1.5)
    assert toy.lr_schedule is schedule
    toy.policy.optimizer._optimizer_step_pre_hooks.clear()
    toy.learn(STEPS, callback=(watch := Watch()))
    assert toy.logger.name_to_value["train/learning_rate"] == pytest.approx(3e-4)
    assert watch.divergences == []  # nothing steers it


def test_records_that_are_dropped_leave_the_controller_in_place():
    class Faulty(Toy):
        """Return a reward that is not a number in each tenth step."""

        def step(self, action: Any) -> Any:
            self.count = getattr(self, "count", 0) + 1
            observation, reward, *rest = super().step(action)
            return observation, math.nan if self.count % 10 == 0 else reward, *rest

    def train(*callbacks: BaseCallback) -> Any:
        toy = PPO("MlpPolicy", DummyVecEnv([Faulty]), n_steps=STEPS, batch_size=16, n_epochs=2, seed=0, device="cpu")
        with np.errstate(invalid="ignore"):
            toy.learn(3 * STEPS, callback=list(callbacks))
        return toy

    trained = []
    for order in (1, -1):
        controller, callback = KLController(1e9), InfluenceCallback(KeepAll(), on_nonfinite="drop")
        trained.append(train(*[controller, callback][::order]))
        assert all(row["nonfinite"] and row["kept"] >= 2 for row in callback.metrics)
        assert [row["train/kl"] > 0 for row in callback.metrics] == [True] * 3
        assert controller.scale == pytest.approx(1.5**3)
    assert parameters(trained[0]).equal(parameters(trained[1]))


def test_a_model_of_one_step_a_round_has_no_minibatch_to_steer():
    for toy in (model(A2C), model(batch_size=STEPS, n_epochs=1)):
        with pytest.raises(Unsupported, match=r"takes one step a round.*KLController\(every='round'\)"):
            toy.learn(STEPS, callback=KLController(every="minibatch"))
    model(batch_size=STEPS, n_epochs=2).learn(STEPS, callback=KLController(every="minibatch"))


def test_what_stays_of_it():
    toy = model()
    toy.learn(STEPS)
    schedule, attributes = toy.lr_schedule, set(vars(toy))
    controller = KLController(1e9)
    toy.learn(2 * STEPS, callback=controller, reset_num_timesteps=False)
    assert toy.lr_schedule is schedule
    assert set(vars(toy)) == attributes
    assert type(toy) is original_class(toy) is PPO
    toy.learn(STEPS, callback=controller, reset_num_timesteps=False)
    assert controller.scale == pytest.approx(1.5**3)  # it goes on where it was


def test_wrong_arguments():
    for target in (0, -0.01, math.inf, math.nan, "0.01", True, None):
        with pytest.raises(WhenceError, match=r"target_kl is .*; a finite number above 0"):
            KLController(target)
    with pytest.raises(WhenceError, match=r"every is 'rounds'. Did you mean round"):
        KLController(every="rounds")
    for bounds in ((1e-2, 1e-5), (0, 1), (1e-5, math.inf), (1e-5, 1e-3, 1e-2), (1e-5,), 1e-3, ("1e-5", "1e-2")):
        with pytest.raises(WhenceError, match=r"bounds are .*the lower one first"):
            KLController(bounds=bounds)
    one, other = KLController(np.float32(0.5), bounds=[1e-5, 1e-2]), KLController(0.5, bounds=(1e-5, 1e-2))
    assert repr(one) == repr(other)  # which a run knows its controller by
    with pytest.raises(WhenceError, match=r"learning rate is 0.1, and the bounds .* are 1e-05 and 0.01. Pass bounds"):
        model(learning_rate=0.1).learn(STEPS, callback=KLController(bounds=(1e-5, 1e-2)))
    with pytest.raises(WhenceError, match="learning rate is 0 at the start"):
        model(learning_rate=0.0).learn(STEPS, callback=KLController())
    steered = model()
    schedule = steered.lr_schedule
    with pytest.raises(WhenceError, match=r"Two KLControllers.*Pass one"):
        steered.learn(STEPS, callback=[KLController(), KLController()])
    assert (steered.num_timesteps, steered.lr_schedule) == (0, schedule)
    with pytest.raises(Unsupported, match="changes the learning rate at each step"):
        model().learn(STEPS, callback=[InfluenceCallback(KeepAll(), recordings=[1]), KLController(every="minibatch")])
    with pytest.raises(WhenceError, match="kl_per_round is -1"):
        RunConfig(env="CartPole-v1", arm="ppo", seed=0, kl_per_round=-1)


def test_whence_train_steers_each_round(tmp_path):
    config = RunConfig(
        env="CartPole-v1",
        arm="iif",
        seed=0,
        kl_per_round=0.005,
        rounds=3,
        eval_episodes=0,
        hyperparameters={"n_steps": 64},
    )
    run(config, tmp_path / "run")
    metrics = RunDirectory.open(tmp_path / "run").table("metrics")
    rates = metrics["train/learning_rate"].to_list()
    assert rates[0] == 3e-4
    assert rates[1] == pytest.approx(3e-4 * choose_factor(metrics["train/kl"][0], 0.005))
