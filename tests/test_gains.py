"""What selections gain on records that no training has seen, held against its definitions."""

from types import SimpleNamespace

import pytest
import torch
from scipy import optimize

from test_rounds import assert_untouched, model_of, recorded, state_of
from whence import WhenceError
from whence.counterfactual import measure_gains
from whence.counterfactual.gains import _as_far
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


def of_parameters(model, params, records):
    """Return log-probs and entropy by SB3, at these parameters."""
    before = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}
    load_tensors({name: named_tensors(model.policy)[name] for name in params}, params)
    with torch.no_grad():
        _, log_probs, entropy = model.policy.evaluate_actions(records.observations, records.actions)
    load_tensors(named_tensors(model.policy), before)
    return log_probs.double(), float(entropy.double().mean())


def steering(params):
    return {name: tensor for name, tensor in params.items() if "value" not in name and "vf" not in name}


def test_gains_by_their_definitions(case):
    model, recording, fresh = case
    kinds = {"own": fresh.advantages, "turned": 3 - 2 * fresh.advantages}
    told, before = [], state_of(model)
    table = measure_gains(
        model.policy, recording, halves(), fresh, advantages=kinds, orders=2, seed=5, on_stage=told.append
    )
    assert_untouched(before, state_of(model))
    assert told == ["training on 3 selections, order 1 of 2", "training on 3 selections, order 2 of 2"]
    assert table.height == 2 * 3 * 2
    start = steering(recording.start)
    old_log_probs, old_entropy = of_parameters(model, recording.start, fresh)
    generator = torch.Generator().manual_seed(5)
    masks = torch.stack([torch.ones(64, dtype=torch.bool), *halves().values()])
    for order in (1, 2):
        trained = retrain(model.policy, recording, masks, orders=reshuffle(masks, 16, 3, generator))
        updates = [
            {name: tensor[row] - start[name] for name, tensor in trained.items() if name in start} for row in range(3)
        ]
        norms = [float(torch.cat([own.flatten() for own in update.values()]).double().norm()) for update in updates]

        def ratio(update, scale=1.0):
            log_probs, _ = of_parameters(
                model, {name: start[name] + scale * own for name, own in update.items()}, fresh
            )
            return (log_probs - old_log_probs).exp()

        def scale(update, wanted):
            def less(scale):
                moved = ratio(update, scale)
                return float((moved - 1 - moved.log()).mean()) - wanted

            return optimize.brentq(less, 1e-3, 30)

        for row, (name, mask) in enumerate(zip(("all", *halves()), masks, strict=True)):
            log_probs, _ = of_parameters(model, {k: t[row] for k, t in trained.items()}, recording.records)
            own = recording.records.advantages.double()
            trained_gain = ((log_probs - recording.records.log_probs.double()).exp() - 1) * (own - own.mean())
            _, entropy = of_parameters(model, {k: t[row] for k, t in trained.items()}, fresh)
            moved = ratio(updates[row])
            for kind, advantages in kinds.items():
                (found,) = table.filter(order=order, selection=name, advantages=kind).to_dicts()
                centred = advantages.double() - advantages.double().mean()

                def gain(ratio, centred=centred, rel=1e-6):
                    return pytest.approx(float((ratio * centred).mean()), abs=2e-5, rel=rel)

                assert found["kept"] == int(mask.sum())
                assert found["norm"] == pytest.approx(norms[row], rel=1e-4)
                assert found["kl"] == pytest.approx(float((moved - 1 - moved.log()).mean()), abs=1e-6)
                assert found["entropy"] == pytest.approx(entropy - old_entropy, abs=1e-5)
                assert found["trained"] == pytest.approx(float(trained_gain.mean()), abs=2e-5)
                assert found["gain"] == gain(moved)
                assert found["all_as_long"] == gain(ratio(updates[0], norms[row] / norms[0]))
                assert found["all_as_far"] == gain(ratio(updates[0], scale(updates[0], found["kl"])), rel=0.01)


def test_training_on_everything_is_its_own_measure(case):
    model, recording, fresh = case
    table = measure_gains(model.policy, recording, {"again": torch.ones(64, dtype=torch.bool)}, fresh, orders=1)
    for row in table.to_dicts():
        assert row["gain"] == pytest.approx(row["all_as_long"], abs=1e-9)
        assert row["gain"] == pytest.approx(row["all_as_far"], abs=1e-9)
    assert table["all_as_far"].null_count() == 0
    # Clipped steps on the rollout's own advantages raise what they were made of.
    assert table["trained"].min() > 0


def test_where_no_length_goes_as_far_nothing_is_said():
    calls = []

    def judge(update, scale):
        calls.append(scale)
        return SimpleNamespace(kl=min(scale, 1e-3) ** 2)

    assert _as_far(judge, {}, 1.0) is None
    assert len(calls) == 20
    assert _as_far(lambda update, scale: SimpleNamespace(kl=0.0), {}, 1.0) is None
    assert _as_far(lambda update, scale: SimpleNamespace(kl=scale**2), {}, 9.0).kl == pytest.approx(9.0, rel=0.01)


def test_what_is_refused(case):
    model, recording, fresh = case
    with pytest.raises(WhenceError, match="'all' is there by itself"):
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
