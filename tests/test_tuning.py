"""The judge of steps, on a bandit whose best step follows on paper."""

import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from studies.advantages import change_lambda
from studies.tuning import tables as tuning_tables
from studies.tuning.candidates import (
    AS_RECORDED,
    SCALES,
    Candidate,
    judge,
    list_candidates,
    measure_round,
    recommend_scale,
    summarise,
    train_halves,
)
from toys import Softmax, softmax_view
from whence import PPOClip, RecordBatch
from whence.rounds import OptimizerState, RoundRecording, Update

SHARE = 0.2
"""How probable the good action is before the round."""

FULL = Update(
    algorithm="ppo", clip_range=10.0, clip_range_vf=None, normalize_advantage=True, ent_coef=0.0, vf_coef=0.0,
    max_grad_norm=math.inf, target_kl=None, n_epochs=1, batch_size=None,
)  # fmt: skip


def logits() -> torch.Tensor:
    return torch.tensor([math.log(SHARE), math.log(1 - SHARE)])


def bandit(learning_rate: float, number: int = 1, shuffled: int | None = None) -> tuple[object, RoundRecording]:
    """Return one full-batch step: a good action whose advantage is +5 or -3, a bad one whose is 0; halves are equal."""
    n = 400
    actions = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1, 1] * (n // 10)).repeat_interleave(2)
    advantages = torch.tensor([5.0, -3.0, *[0.0] * 8] * (n // 10)).repeat_interleave(2)
    if shuffled is not None:
        advantages = advantages[torch.randperm(2 * n, generator=torch.Generator().manual_seed(shuffled))]
    log_probs = logits().log_softmax(-1)[actions]
    records = RecordBatch(
        observations=torch.ones(2 * n), actions=actions, log_probs=log_probs, advantages=advantages,
        values=torch.zeros(2 * n), returns=torch.zeros(2 * n), episode_ids=torch.arange(2 * n),
        episode_starts=torch.ones(2 * n, dtype=torch.bool), env_index=torch.zeros(2 * n, dtype=torch.long),
        record_ids=torch.arange(2 * n),
    )  # fmt: skip
    policy = Softmax()
    with torch.no_grad():
        policy.theta.copy_(logits())
    settings = {"lr": learning_rate, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False,
                "maximize": False}  # fmt: skip
    recording = RoundRecording(
        number=number, records=records, start={"theta": logits()}, end={"theta": logits()},
        optimizer=OptimizerState("SGD", settings, {}), minibatches=(torch.arange(2 * n),), epochs=(0,), stopped=False,
        update=FULL, generator=torch.get_rng_state(), versions={},
    )  # fmt: skip
    return softmax_view(policy), recording


def test_the_judge_by_hand():
    log_ratio = torch.tensor([3.0, 3.0, 0.25, 0.25, 1.0]).log().double()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]).double()
    # A ratio of 3 counts as 2 where it helps, and as 3 where it harms; one of 1/4 as 1/4, and as 1/2.
    pessimistic, plain, kl = judge(log_ratio, advantages)
    assert pessimistic == pytest.approx((2 - 3 + 0.25 - 0.5 + 2) / 5)
    assert plain == pytest.approx((3 - 3 + 0.25 - 0.25 + 2) / 5)
    assert kl == pytest.approx((2 * (2 - math.log(3)) + 2 * (-0.75 + math.log(4))) / 5)


def gain_on_paper(step: float) -> float:
    """Return the judged gain of moving the logits apart by `step` in all."""
    probability = 1 / (1 + (1 - SHARE) / SHARE * math.exp(-step))
    ratio, other = probability / SHARE, (1 - probability) / (1 - SHARE)
    mean, deviation = 0.2, math.sqrt((0.1 * 4.8**2 + 0.1 * 3.2**2 + 0.8 * 0.2**2) * 800 / 799)
    good = 0.1 * (min(ratio, 2) * 4.8 - ratio * 3.2)
    bad = 0.8 * -mean * max(other, 0.5)
    return (good + bad) / deviation


STEP_TO_TWICE = math.log(0.4 / 0.6) - math.log(0.2 / 0.8)
"""How far the logits move apart until the good action is twice as probable; a longer step only loses."""


@pytest.mark.parametrize("best", [0.5, 1.0, 2.0, 3.0])
def test_the_best_step_is_the_one_on_paper(best):
    # One step moves the logits apart by twice the rate times mean(A (1[good] - SHARE)), A normalised.
    deviation = math.sqrt((0.1 * 4.8**2 + 0.1 * 3.2**2 + 0.8 * 0.2**2) * 400 / 399)
    slope = 2 * (0.1 * 4.8 * 0.8 - 0.1 * 3.2 * 0.8 + 0.8 * -0.2 * -0.2) / deviation
    learning_rate = STEP_TO_TWICE / best / slope
    rows = [row for number in range(1, 5) for row in measure_round(*bandit(learning_rate, number))]
    assert recommend_scale(rows) == best
    on_paper = {scale: gain_on_paper(STEP_TO_TWICE * scale / best) - gain_on_paper(0) for scale in SCALES}
    assert max(on_paper, key=lambda scale: on_paper[scale]) == best
    for row in summarise(rows).to_dicts():
        assert row["mean"] == pytest.approx(on_paper[row["scale"]], rel=1e-3, abs=1e-6)
        assert row["candidate"] == AS_RECORDED.name


def test_shuffled_advantages_tell_nothing():
    rows = [row for number in range(1, 11) for row in measure_round(*bandit(2.0, number, shuffled=number))]
    assert recommend_scale(rows) is None


def test_a_policy_is_left_as_it_is():
    view, recording = bandit(1.0)
    before = {name: value.clone() for name, value in view.parameters().items()}
    state = torch.get_rng_state()
    measure_round(view, replace(recording), orders=2)
    assert all(value.equal(before[name]) for name, value in view.parameters().items())
    assert torch.get_rng_state().equal(state)


def rollout(n: int = 60, gamma: float = 0.9, gae_lambda: float = 0.8) -> tuple[RecordBatch, torch.Tensor]:
    """Return two environments' records with advantages by GAE, and their TD errors."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.zeros(2 * n, dtype=torch.bool)
    starts[[0, 11, 30, n, n + 25]] = True
    env_index = torch.arange(2).repeat_interleave(n)
    errors = torch.randn(2 * n, generator=generator, dtype=torch.double)
    values = torch.randn(2 * n, generator=generator, dtype=torch.double)
    return RecordBatch(
        observations=torch.ones(2 * n), actions=torch.zeros(2 * n, dtype=torch.long), log_probs=torch.zeros(2 * n),
        advantages=by_the_sum(errors, starts, env_index, gamma * gae_lambda), values=values, returns=errors,
        episode_starts=starts, env_index=env_index, record_ids=torch.arange(2 * n), gamma=gamma, gae_lambda=gae_lambda,
    ), errors  # fmt: skip


def by_the_sum(errors: torch.Tensor, starts: torch.Tensor, env_index: torch.Tensor, decay: float) -> torch.Tensor:
    """Return sum over l of decay^l times the error l records on, to the end of the episode or the rollout."""
    advantages = torch.zeros_like(errors)
    for first in range(len(errors)):
        for at in range(first, len(errors)):
            if at > first and (starts[at] or env_index[at] != env_index[first]):
                break
            advantages[first] += decay ** (at - first) * errors[at]
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.8, 1.0])
def test_advantages_of_another_lambda(gae_lambda):
    records, errors = rollout()
    changed = change_lambda(records, gae_lambda)
    expected = by_the_sum(errors, records.episode_starts, records.env_index, 0.9 * gae_lambda)
    torch.testing.assert_close(changed.advantages, expected)
    torch.testing.assert_close(changed.returns, expected + records.values)


def test_candidates_train_as_they_say():
    # Halves are alternate episodes. Dropping every record below 0 leaves those that raise the good action: the half
    # moves further than with all of them. Two epochs move further than one; other lambdas need a rollout's lambda.
    view, recording = bandit(0.5)
    far = {}
    for candidate in (AS_RECORDED, Candidate("2 epochs", n_epochs=2), Candidate("drop", drop=1.0)):
        trained, half = train_halves(view, recording, candidate, PPOClip(), torch.Generator().manual_seed(0))
        assert half.tolist() == [0, 1] * 400
        far[candidate.name] = (trained["theta"] - logits()).diff()[:, 0].abs()
    assert (far["2 epochs"] > 1.5 * far["as recorded"]).all()
    assert (far["drop"] > far["as recorded"]).all()


def test_every_setting_changes_one_thing():
    _, recording = bandit(0.5)
    candidates = list_candidates(replace(recording, update=replace(FULL, n_epochs=10, batch_size=64)))
    changes = [{k: v for k, v in vars(each).items() if v is not None and k != "name"} for each in candidates]
    assert changes == [
        {}, {"n_epochs": 5}, {"n_epochs": 20}, {"batch_size": 32}, {"batch_size": 128}, {"gae_lambda": 0.9},
        {"gae_lambda": 1.0}, {"drop": 0.125}, {"drop": 0.5},
    ]  # fmt: skip


def test_signs_are_counted_in_each_environment():
    def rows(*, gain, by_returns, trained):
        means = {"gain": gain, "gain_by_returns": by_returns, "trained": trained}
        return [{"candidate": "5 epochs", **{name: {"mean": mean} for name, mean in means.items()}}]

    settings = {
        "a": rows(gain=1.0, by_returns=-1.0, trained=-2.0),
        "b": rows(gain=-1.0, by_returns=-1.0, trained=-0.1),
        "c": rows(gain=1.0, by_returns=-1.0, trained=3.0),
    }
    (count,) = [each for each in tuning_tables.count_signs(settings) if each["environments"]]
    assert count == {"candidate": "5 epochs", "environments": 3, "gain": 2, "gain_by_returns": 2, "rule": 2}


def test_a_rate_that_is_named_is_that_of_the_nearest_run():
    results = {"lr0.0001": 1.0, "lr0.0003": 2.0, "lr0.001": 5.0, "lr0.003": 3.0}
    rows = {**results, **dict.fromkeys(tuning_tables.TARGET_STEPS, 4.0)}
    runs = pl.DataFrame(
        [{"arm": "ppo", "steps": steps, "seed": seed, "mean": r + seed} for steps, r in rows.items() for seed in (0, 1)]
    )
    rates = tuning_tables.compare_rates(runs, 2.0, others_rate=0.003)
    assert (rates["best_rate"], rates["named_rate"], rates["nearest_rate"]) == (0.001, 0.0006, 0.001)
    assert (rates["named"]["mean"], rates["others"]["mean"], rates["kl0.02"]["mean"]) == (5.5, 3.5, 4.5)
    assert tuning_tables.compare_rates(runs, None, others_rate=0.003)["nearest_rate"] == 0.0003


def test_the_tables_are_those_of_the_runs(monkeypatch):
    texts = {}
    monkeypatch.setattr(tuning_tables, "write_text", lambda path, text: texts.update({path.name: text}))
    results = Path(__file__).parent.parent / "results"
    tuning_tables.write_tables(results / "tuning", results / "practice")
    assert texts == {
        name: (results / "tuning" / name).read_text(encoding="utf-8") for name in ("tables.md", "summary.json")
    }
