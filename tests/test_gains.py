"""What selections gain on fresh records, by its definitions."""

from types import SimpleNamespace

import pytest
import torch
from scipy import optimize

from test_rounds import assert_untouched, model_of, recorded, state_of
from whence import WhenceError
from whence.counterfactual import measure_gains
from whence.counterfactual.gains import _scale_to_divergence
from whence.counterfactual.retrain import reshuffle, retrain
from whence.sb3 import collect
from whence.sb3.state import load_tensors, named_tensors

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.fixture(scope="module", params=["SGD", "Adam"])
def case(request):
    model = model_of(request.param, ent_coef=0.01, learning_rate={"SGD": 1.0, "Adam": 0.01}[request.param])
    recording = recorded(model)
    load_tensors(named_tensors(model.policy), recording.start)
    return model, recording, collect(model)


def halves():
    return {"first": torch.arange(64) < 32, "most": torch.arange(64) < 49}


def evaluate_at(model, params, records):
    """Return log-probs and entropy by SB3, at these parameters."""
    before = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}
    load_tensors({name: named_tensors(model.policy)[name] for name in params}, params)
    with torch.no_grad():
        _, log_probs, entropy = model.policy.evaluate_actions(records.observations, records.actions)
    load_tensors(named_tensors(model.policy), before)
    return log_probs.double(), float(entropy.double().mean())


def select_acting(params):
    return {name: tensor for name, tensor in params.items() if "value" not in name and "vf" not in name}


def test_gains_by_their_definitions(case):
    model, recording, fresh = case
    kinds = {"own": fresh.advantages, "turned": 3 - 2 * fresh.advantages}
    stages, before = [], state_of(model)
    table = measure_gains(
        model.policy, recording, halves(), fresh, advantages=kinds, orders=2, seed=5, on_stage=stages.append
    )
    assert_untouched(before, state_of(model))
    assert stages == ["training on 3 selections, order 1 of 2", "training on 3 selections, order 2 of 2"]
    assert table.height == 2 * 3 * 2
    start = select_acting(recording.start)
    old_log_probs, old_entropy = evaluate_at(model, recording.start, fresh)
    generator = torch.Generator().manual_seed(5)
    masks = torch.stack([torch.ones(64, dtype=torch.bool), *halves().values()])
    for order in (1, 2):
        trained = retrain(model.policy, recording, masks, orders=reshuffle(masks, 16, 3, generator))
        updates = [
            {name: tensor[row] - start[name] for name, tensor in trained.items() if name in start} for row in range(3)
        ]
        norms = [float(torch.cat([t.flatten() for t in update.values()]).double().norm()) for update in updates]

        def ratio(update, scale=1.0):
            log_probs, _ = evaluate_at(
                model, {name: start[name] + scale * tensor for name, tensor in update.items()}, fresh
            )
            return (log_probs - old_log_probs).exp()

        def scale_to(update, kl):
            def exceed(scale):
                moved = ratio(update, scale)
                return float((moved - 1 - moved.log()).mean()) - kl

            return optimize.brentq(exceed, 1e-3, 30)

        for row, (name, mask) in enumerate(zip(("all", *halves()), masks, strict=True)):
            log_probs, _ = evaluate_at(model, {k: t[row] for k, t in trained.items()}, recording.records)
            raw = recording.records.advantages.double()
            trained_gain = ((log_probs - recording.records.log_probs.double()).exp() - 1) * (raw - raw.mean())
            _, entropy = evaluate_at(model, {k: t[row] for k, t in trained.items()}, fresh)
            moved = ratio(updates[row])
            for kind, advantages in kinds.items():
                (measured,) = table.filter(order=order, selection=name, advantages=kind).to_dicts()
                centred = advantages.double() - advantages.double().mean()

                def gain(ratio, centred=centred, rel=1e-6):
                    return pytest.approx(float((ratio * centred).mean()), abs=2e-5, rel=rel)

                assert measured["kept"] == int(mask.sum())
                assert measured["norm"] == pytest.approx(norms[row], rel=1e-4)
                assert measured["kl"] == pytest.approx(float((moved - 1 - moved.log()).mean()), abs=1e-6)
                assert measured["entropy"] == pytest.approx(entropy - old_entropy, abs=1e-5)
                assert measured["trained"] == pytest.approx(float(trained_gain.mean()), abs=2e-5)
                assert measured["gain"] == gain(moved)
                assert measured["all_as_long"] == gain(ratio(updates[0], norms[row] / norms[0]))
                assert measured["all_as_far"] == gain(ratio(updates[0], scale_to(updates[0], measured["kl"])), rel=0.01)


def test_training_on_everything_is_its_own_measure(case):
    model, recording, fresh = case
    table = measure_gains(model.policy, recording, {"again": torch.ones(64, dtype=torch.bool)}, fresh, orders=1)
    for row in table.to_dicts():
        assert row["gain"] == pytest.approx(row["all_as_long"], abs=1e-9)
        assert row["gain"] == pytest.approx(row["all_as_far"], abs=1e-9)
    assert table["all_as_far"].null_count() == 0
    # Clipped steps on the rollout's advantages raise the surrogate on the rollout.
    assert table["trained"].min() > 0


def test_a_divergence_that_no_scale_reaches():
    calls = []

    def judge(update, scale):
        calls.append(scale)
        return SimpleNamespace(kl=min(scale, 1e-3) ** 2)

    assert _scale_to_divergence(judge, {}, 1.0) is None
    assert len(calls) == 20
    assert _scale_to_divergence(lambda update, scale: SimpleNamespace(kl=0.0), {}, 1.0) is None
    assert _scale_to_divergence(lambda update, scale: SimpleNamespace(kl=scale**2), {}, 9.0).kl == pytest.approx(
        9.0, rel=0.01
    )


def test_what_is_refused(case):
    model, recording, fresh = case
    with pytest.raises(WhenceError, match="'all' is always included"):
        measure_gains(model.policy, recording, {"all": torch.ones(64, dtype=torch.bool)}, fresh)
    with pytest.raises(WhenceError, match="orders is 0"):
        measure_gains(model.policy, recording, halves(), fresh, orders=0)
    with pytest.raises(WhenceError, match=r"'own' have shape \(3,\)"):
        measure_gains(model.policy, recording, halves(), fresh, advantages={"own": torch.zeros(3)})
    with pytest.raises(WhenceError, match="of finite numbers is needed"):
        measure_gains(model.policy, recording, halves(), fresh, advantages={"own": fresh.advantages / 0})
    for mask in (torch.ones(63, dtype=torch.bool), torch.ones(64)):
        with pytest.raises(WhenceError, match=r"'some' is \(6.,\) torch"):
            measure_gains(model.policy, recording, {"some": mask}, fresh)
    with pytest.raises(WhenceError, match="fewer than two"):
        measure_gains(model.policy, recording, {"one": torch.arange(64) < 1}, fresh)
    other = fresh.with_columns({"log_probs": fresh.log_probs - 0.01})
    with pytest.raises(WhenceError, match=r"not collected by the policy of round 2.*log-probs are 0\.01 apart on aver"):
        measure_gains(model.policy, recording, halves(), other)
