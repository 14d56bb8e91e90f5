"""`check_engines` on policies of several kinds."""

import polars as pl
import pytest
from torch import Tensor, nn

import whence
from helpers.architectures import SCORED, make_case
from helpers.toys import log_probs, mlp_view, model, records_for
from whence import Action, Return, WhenceError, attribute, check_engines
from whence.sb3 import collect


@pytest.mark.parametrize(("case", "auto"), [("transformer", "vmap"), ("bilinear", "forward"), ("LSTM", "vmap")])
def test_networks_beyond_ghost_are_scored_right_or_refused(case: str, auto: str) -> None:
    net, records = make_case(*SCORED[case])
    view = whence.ModuleView(net, log_probs)
    table = check_engines(view, records)
    scored = table.filter(table["refused"].is_null())
    assert (scored["difference"] <= 1e-5).all()
    assert auto in scored["engine"].to_list()
    assert scored["seconds"].min() > 0
    ghost = table.row(by_predicate=pl.col("engine") == "ghost", named=True)
    assert "engine='forward'" in ghost["refused"]
    influence = attribute(view, records, target=Return())
    assert influence.engine == auto
    assert ghost["refused"] in influence.engine_reason


def test_all_engines_cover_an_sb3_policy() -> None:
    toy = model(observation="image")
    table = check_engines(toy.policy, collect(toy), objective=whence.PPOClip(vf_coef=0.5))
    assert table["engine"].to_list() == ["ghost", "forward", "vmap", "loop"]
    assert table["refused"].null_count() == 4
    assert table["difference"].max() <= 1e-5


def test_a_wrong_rule_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = whence.engines.rules
    rule = rules._RULES[nn.Linear]
    wrong = whence.engines.LayerRule(lambda *args: 1.1 * rule.product(*args), rule.gradient)
    monkeypatch.setitem(rules._RULES, nn.Linear, wrong)
    view = mlp_view()
    table = check_engines(view, records_for(view), engines=["ghost"])
    assert "differ from the plain loop's by 0.1 of the largest" in table["refused"].item()
    # The half of a rule that only several targets use shows as well.
    half = whence.engines.LayerRule(rule.product, lambda *args: {k: 5 * v for k, v in rule.gradient(*args).items()})
    monkeypatch.setitem(rules._RULES, nn.Linear, half)
    assert "differ from the plain loop's" in check_engines(view, records_for(view), engines=["ghost"])["refused"].item()


def test_an_unknown_engine_is_refused() -> None:
    view = mlp_view()
    with pytest.raises(WhenceError, match=r"engines holds 'gohst'.*ghost"):
        check_engines(view, records_for(view), engines=["gohst"])


def test_the_target_is_the_users() -> None:
    view = mlp_view()
    records = records_for(view)
    seen = []

    def target(view: whence.PolicyView, params: whence.core.Params, records: whence.RecordBatch) -> Tensor:
        seen.append(None)
        return Action(records.observations[0], records.actions[0])(view, params, records)

    assert check_engines(view, records, target=target)["difference"].max() <= 1e-5
    assert len(seen) == 7  # loop once, the others twice


def test_an_engine_of_ones_own() -> None:
    engines = dict(whence.engines.auto._ENGINES)
    try:
        whence.engines.register_engine("twice", lambda problem: 2 * engines["loop"](problem))
        view = mlp_view()
        records = records_for(view, 40)
        truth = attribute(view, records, target=Return(), engine="loop")
        twice = attribute(view, records, target=Return(), engine="twice")
        assert twice.scores.tolist() == pytest.approx((2 * truth.scores).tolist())
        assert attribute(view, records, target=Return()).engine == "ghost"
        assert check_engines(view, records, engines=["twice"])["difference"].item() == pytest.approx(1)
        for taken in ("twice", "auto", "ghost"):
            with pytest.raises(WhenceError, match=f"an engine '{taken}' already"):
                whence.engines.register_engine(taken, engines["loop"])
    finally:
        del whence.engines.auto._ENGINES["twice"]
    with pytest.raises(WhenceError, match=r"engine is 'twice'"):
        attribute(view, records, target=Return(), engine="twice")
