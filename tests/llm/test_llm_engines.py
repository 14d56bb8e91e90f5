"""Rows of language models scored: every engine against the loop; test_llm_tokens.py has it against autograd."""

import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import whence
from helpers.languages import STYLES, language_model, rows_for, scored, shaken, tokens
from helpers.toys import difference
from whence import InvalidRecords, Outputs, RecordBatch, Unsupported, WhenceError, attribute
from whence.core import notes_on, reads_scored_records
from whence.engines import ghost, memory, problem, rules
from whence.llm import (
    SequenceReturn,
    SequenceReward,
    TokenPPO,
    TokenReturn,
    ValidationLoss,
    language_view,
    make_rows,
    register_rmsnorm,
)
from whence.llm.base import EXTRA_PADDING, WithValueHead
from whence.scores.attribution import score_targets

EXACT = 1e-4
SHOWN = [("gpt2", "eager", 0.1), ("gpt_neo", "sdpa", None)]
"""Cells that short tests have; test_llm_tokens.py holds the scores of others against autograd."""


def targets_for(model: nn.Module) -> dict[str, Any]:
    return {
        "sequence": SequenceReturn(),
        "token": TokenReturn(),
        "held out": SequenceReturn(rows_for(model), batch_size=4),
        "held-out tokens": TokenReturn(rows_for(model), batch_size=4),
        "validation": ValidationLoss(**tokens(), batch_size=4),
    }


@pytest.mark.parametrize(
    ("style", "attention", "lora"),
    [
        # One model shows an adapter's layers, which are the same in every model.
        pytest.param(*cell, marks=pytest.mark.long if cell not in SHOWN else ())
        for cell in itertools.product(STYLES, ("sdpa", "eager"), (None, 0.1))
        if cell[1] == "sdpa" or cell[0] in ("gpt2", "qwen3")
    ],
)
def test_models_score_as_the_loop_does(style: str, attention: str, lora: float | None) -> None:
    model = language_model(style, attention=attention, lora=lora)
    view, rows, targets = language_view(model), rows_for(model), targets_for(model)
    # The ghost engine has a way of its own where an objective reads log-probs alone; the forward engine has one way.
    for objective, engines in ((TokenPPO(), ["auto"]), (TokenPPO(ent_coef=0.1), ["auto", "forward"])):
        truth = attribute(view, rows, target=targets, objective=objective, engine="loop")
        assert min(one.scores.abs().max() for one in truth.values()) > 1e-4
        for engine in engines:
            found = attribute(view, rows, target=targets, objective=objective, engine=engine)
            assert {one.engine for one in found.values()} == {"ghost" if engine == "auto" else "forward"}
            for name, one in found.items():
                assert difference(one, truth[name]) <= EXACT, (engine, name)
        for name in ("sequence", "validation"):  # one target and several take different ways through the ghost engine
            one = attribute(view, rows, target=targets[name], objective=objective, engine="ghost")
            assert difference(one, truth[name]) <= EXACT, name


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.long), 0.0])
def test_values_are_scored_too(lora: float | None) -> None:
    model = shaken(WithValueHead(language_model("llama", lora=lora)))
    rows = rows_for(model)
    engines = ("loop", "auto", "forward")
    truth, *others = (scored(model, rows, objective=TokenPPO(vf_coef=0.1), engine=engine) for engine in engines)
    assert [one.engine for one in (truth, *others)] == ["loop", "ghost", "forward"]
    assert max(difference(one, truth) for one in others) <= EXACT
    without = scored(model, rows)
    assert difference(without, truth) > 1e-3
    assert "value_head.weight" in without.provenance.parameters


def turned(given: dict[str, Tensor], prompt: int, more: int) -> dict[str, Tensor]:
    """The same rows with prompts padded on the right, by `more` tokens more."""
    given = dict(given)
    for name in ("input_ids", "attention_mask"):
        before = torch.zeros(len(given[name]), prompt + more, dtype=torch.long)
        for row, (column, attended) in enumerate(zip(given[name], given["attention_mask"].bool(), strict=True)):
            own = column[:prompt][attended[:prompt]]
            before[row, : len(own)] = own
        given[name] = torch.cat([before, given[name][:, prompt:]], dim=1)
    return given


@pytest.mark.parametrize(
    ("style", "more"),
    [("gpt2", 3), ("qwen3", 0), *(pytest.param(*case, marks=pytest.mark.long) for case in (("gpt2", 0), ("qwen3", 3)))],
)
def test_padding_makes_no_difference(style: str, more: int) -> None:
    model = language_model(style)
    given = tokens()
    rows = rows_for(model, given)
    other = turned(given, 5, more)
    assert not torch.equal(other["attention_mask"][:, :5], given["attention_mask"][:, :5])
    moved = make_rows(**other, **{name: rows.observations[name] for name in ("log_probs", "advantages")})
    for engine in ("loop", "ghost"):
        assert difference(scored(model, moved, engine=engine), scored(model, rows, engine=engine)) <= 1e-5


def test_neither_order_nor_chunks_make_a_difference() -> None:
    model = language_model("gpt2")
    rows, order = rows_for(model, tokens(9)), torch.randperm(9)
    targets = {name: each for name, each in targets_for(model).items() if name not in ("token", "held out")}
    whole = scored(model, rows, target=targets)
    mixed = scored(model, rows.take(order), target=targets)
    for name, one in whole.items():
        torch.testing.assert_close(mixed[name].scores, one.scores[order], atol=1e-6, rtol=1e-4)
        assert mixed[name].record_ids.tolist() == order.tolist()
    for engine, size in (("ghost", 1), ("ghost", 4), ("forward", 4), ("loop", 4)):
        view = language_view(model)
        parts = score_targets(view, rows, targets, objective=TokenPPO(), engine=engine, chunk_size=size)
        assert max(difference(parts[name], one) for name, one in whole.items()) <= EXACT


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("lora", [None, 0.0])
def test_a_model_with_checkpoints_scores_as_without(reentrant: bool, lora: float | None) -> None:
    model = language_model("llama", lora=lora)
    rows = rows_for(model)
    expected = scored(model, rows, engine="loop")
    inner = model if lora is None else model.get_base_model()
    name = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"  # by its newer name
    getattr(inner, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})
    model.train()
    found = scored(model, rows)
    assert found.engine == "ghost"
    assert difference(found, expected) <= EXACT
    assert all(module.training for module in model.modules())
    assert getattr(inner, f"is_{name}_checkpointing")


@pytest.mark.parametrize(("target", "apart"), [(SequenceReturn(), 2), (TokenReturn(), 1)])
def test_one_backward_pass_serves_where_target_and_objective_weigh_a_rows_tokens_alike(
    target: Any, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model("llama")
    rows = rows_for(model, tokens(8), spread=0.0)
    given = rows.observations
    columns = {name: given[name] for name in ("input_ids", "attention_mask", "response_mask", "log_probs")}
    seen: list[Any] = []
    monkeypatch.setattr(ghost, "pullback", lambda *args, **more: seen.append(args) or problem.pullback(*args, **more))
    shared = make_rows(**columns, advantages=torch.randn(8, 1).expand(8, 4) * given["response_mask"])
    for batch, expected in ((shared, 1), (rows, apart)):
        scored(model, batch, target=target)  # tries the engine once
        seen.clear()
        found = scored(model, batch, target=target)
        assert len(seen) == expected
        assert difference(found, scored(model, batch, target=target, engine="loop")) <= EXACT


NUMBERS = {
    "response_mask": torch.tensor([[True, True, True], [True, True, False], [False, False, False]]),
    "log_probs": torch.tensor([[-1.0, -2.0, -1.0], [-3.0, -1.0, 7.0], [0.0, 0.0, 0.0]]),
    "advantages": torch.tensor([[1.0, -1.0, 2.0], [-2.0, 0.5, 9.0], [5.0, 5.0, 5.0]]),
    "values": torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 9.0], [1.0, 1.0, 1.0]]),
    "returns": torch.tensor([[1.5, 1.0, 2.0], [0.0, 1.0, 9.0], [1.0, 1.0, 1.0]]),
}
ROWS = make_rows(
    input_ids=torch.full((3, 5), 2), attention_mask=torch.tensor([[1] * 5, [1, 1, 1, 1, 0], [1] * 5]), **NUMBERS
)
SAID = Outputs(
    log_prob=torch.log(torch.tensor([[1.5, 1.5, 0.5], [0.5, 1.1, 1.0], [1.0, 1.0, 1.0]]))
    + ROWS.observations["log_probs"],
    value=torch.tensor([[1.1, 0.5, 2.0], [0.1, 0.5, 3.0], [0.0, 0.0, 0.0]]),
    entropy=torch.tensor([[0.3, 0.6, 0.9], [1.0, 2.0, 50.0], [1.0, 1.0, 1.0]]),
)


def test_token_ppo_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5 and 0.5, 1.1. Tokens: min(1.5, 1.2), min(-1.5, -1.2), min(1, 1.6); min(-1, -1.6), 0.55.
    plain = TokenPPO()(SAID, ROWS)
    assert plain.tolist() == pytest.approx([(1.2 - 1.5 + 1.0) / 3, (-1.6 + 0.55) / 2, 0.0], abs=1e-6)
    # Squared errors of values and of values within 0.2 of the old: .16 .16; .25 .64; 0 0 | .01 .01; .25 .04.
    value = TokenPPO(vf_coef=0.4)(SAID, ROWS) - plain
    assert value.tolist() == pytest.approx([-0.2 * (0.16 + 0.64 + 0) / 3, -0.2 * (0.01 + 0.25) / 2, 0.0], abs=1e-6)
    free = TokenPPO(vf_coef=0.4, clip_range_vf=None)(SAID, ROWS) - plain
    assert free.tolist() == pytest.approx([-0.2 * (0.16 + 0.25 + 0) / 3, -0.2 * (0.01 + 0.25) / 2, 0.0], abs=1e-6)
    entropy = TokenPPO(ent_coef=0.1)(SAID, ROWS) - plain
    assert entropy.tolist() == pytest.approx([0.06, 0.15, 0.0], abs=1e-6)
    columns = {name: column for name, column in ROWS.observations.items() if name not in ("values", "returns")}
    without_values = ROWS.with_columns({"observations": columns})
    assert TokenPPO().prepare(without_values) is without_values
    with pytest.raises(InvalidRecords, match=r"`values`.*vf_coef=0"):
        TokenPPO(vf_coef=0.1).prepare(without_values)
    assert TokenPPO().reads == {"log_prob"}
    assert TokenPPO(vf_coef=0.1, ent_coef=0.1).reads == {"log_prob", "value", "entropy"}


def test_rows_are_summed_up_in_the_columns_of_records() -> None:
    assert ROWS.log_probs.tolist() == [-4.0, -4.0, 0.0]
    assert ROWS.advantages.tolist() == [2.0, 0.5, 0.0]
    assert ROWS.actions.shape == (3, 3)
    assert ROWS.observations["log_probs"].tolist()[1:] == [[-3.0, -1.0, 0.0], [0.0, 0.0, 0.0]]


def test_returns_by_hand() -> None:
    said = Outputs(torch.where(NUMBERS["response_mask"], SAID.log_prob, 0.0))
    first, second, _ = said.log_prob.double().tolist()
    sequence = (2.0 * sum(first) + 0.5 * sum(second)) / 3
    token = (first[0] - first[1] + 2 * first[2] - 2 * second[0] + 0.5 * second[1]) / 5
    assert float(SequenceReturn().from_outputs(said, ROWS)) == pytest.approx(sequence, abs=1e-6)
    assert float(TokenReturn().from_outputs(said, ROWS)) == pytest.approx(token, abs=1e-6)
    rewarded = ROWS.with_columns({"rewards": torch.tensor([-2.0, 3.0, 5.0])})
    reward = (-2.0 * sum(first) + 3.0 * sum(second)) / 3
    assert float(SequenceReward().from_outputs(said, rewarded)) == pytest.approx(reward, abs=1e-6)
    with pytest.raises(InvalidRecords, match="pass rewards to make_rows"):
        SequenceReward().from_outputs(said, ROWS)
    assert repr(SequenceReward(ROWS)) != repr(SequenceReward(rewarded))
    assert reads_scored_records(SequenceReturn())
    assert not reads_scored_records(SequenceReturn(ROWS))
    assert repr(SequenceReturn()) == "SequenceReturn()"
    assert repr(TokenReturn(ROWS)).startswith("TokenReturn(3 rows ")


def test_a_temperature_divides_the_logits() -> None:
    model = language_model("llama").eval()
    rows = rows_for(model, tokens(4, empty=False), spread=0.0)
    view = language_view(model, temperature=0.7)
    said = view(view.parameters(), view.prepare(rows))
    assert said.entropy is not None
    for row in range(4):
        own, width = rows.observations["input_ids"][row], 4
        full = model(own[None], attention_mask=rows.observations["attention_mask"][row][None]).logits[0]
        expected = (full[-width - 1 : -1] / 0.7).log_softmax(-1)
        mask = rows.observations["response_mask"][row]
        drawn = expected.gather(1, own[-width:, None])[:, 0]
        torch.testing.assert_close(said.log_prob[row], drawn * mask, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(said.entropy[row], -(expected.exp() * expected).sum(1) * mask, atol=1e-5, rtol=1e-5)


def test_validation_is_the_loss_of_supervised_training() -> None:
    model = language_model("qwen2").eval()
    given = tokens(7)
    labels = torch.full_like(given["input_ids"], -100)
    labels[:, 5:] = torch.where(given["response_mask"], given["input_ids"][:, 5:], -100)
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    theirs = model(given["input_ids"], given["attention_mask"], positions, labels=labels).loss
    view, rows = language_view(model), rows_for(model)
    for size in (1, 3, 16):
        ours = ValidationLoss(**given, batch_size=size)(view, view.parameters(), rows)
        torch.testing.assert_close(ours, -theirs, atol=0, rtol=1e-5)


def test_other_rows_run_through_the_policy_a_batch_at_a_time() -> None:
    model, sizes = language_model("gpt2"), []
    rows, others = rows_for(model).take(slice(0, 1)), rows_for(model, tokens(12))
    model.register_forward_pre_hook(lambda module, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True)

    def held(size: int) -> int:
        return max(memory.measure_bytes(lambda: scored(model, rows, target=SequenceReturn(others, batch_size=size))))

    few, all_at_once = held(2), held(12)
    assert few < 0.5 * all_at_once
    assert sizes.count(2) >= 6


def test_a_small_budget_gives_the_same_scores() -> None:
    model = language_model("llama")
    rows, targets = rows_for(model, tokens(24)), {"sequence": SequenceReturn(), "token": TokenReturn()}
    expected = scored(model, rows, target=targets, engine="loop")
    seen: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    for engine in ("ghost", "forward"):
        seen.clear()
        found = scored(model, rows, target=targets, engine=engine, memory=2**20)
        assert max(seen) < 24
        assert max(difference(found[name], one) for name, one in expected.items()) <= EXACT
    costs = [note for note in notes_on(language_view(model)).values() if isinstance(note, memory._Cost)]
    assert len(costs) == 3, "views of one model share what was measured"
    assert {cost.lasting for cost in costs} == {64 * 4}


class ScaledRMSNorm(nn.Module):
    """Gemma's: the weight is what the scale has more than 1."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.randn(16)), power

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight) ** self.power


@pytest.mark.parametrize(("power", "engine"), [(1, "ghost"), (2, "forward")])
@pytest.mark.parametrize("registered", [False, True])
def test_a_norm_is_looked_at_before_it_is_trusted(
    power: int, engine: str, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    model = language_model("llama")
    model.model.norm = ScaledRMSNorm(power)
    if registered:
        register_rmsnorm(ScaledRMSNorm)
    rows = rows_for(model)
    found = scored(model, rows)
    assert found.engine == engine
    assert engine == "ghost" or "ScaledRMSNorm" in found.engine_reason
    assert difference(found, scored(model, rows, engine="loop")) <= EXACT


@pytest.mark.parametrize("style", ["gpt2", "llama", "opt", pytest.param("biogpt", marks=pytest.mark.long)])
def test_positions_of_rows_begin_where_their_own_batch_does(style: str) -> None:
    model, batch, extra = language_model(style).eval(), tokens(empty=False), torch.tensor([0, 2, 2, 1, 0, 3])
    batch["attention_mask"][:, :3] = torch.arange(3) >= extra[:, None]  # the extra columns are padding in any case
    batch["attention_mask"][:, 3:5] = 1
    rows = rows_for(model, batch)
    rows = rows.with_columns({"observations": {**rows.observations, EXTRA_PADDING: extra}})
    expected = []
    for row, start in enumerate(extra.tolist()):
        ids, mask = (batch[name][row, start:][None] for name in ("input_ids", "attention_mask"))
        logits = model(ids, attention_mask=mask).logits[0, -5:-1].log_softmax(-1)
        expected.append(logits.gather(1, ids[0, -4:, None])[:, 0])
    view, mask = language_view(model), batch["response_mask"]
    for order in (torch.arange(6), torch.tensor([5]), torch.tensor([1, 2])):
        part = rows.take(order)
        log_probs = view(view.parameters(), view.prepare(part)).log_prob
        where = mask[order]
        assert torch.allclose(log_probs[where], torch.stack(expected)[order][where], atol=1e-5)
    truth = scored(model, rows, engine="loop")
    for engine in ("auto", "forward"):
        assert difference(scored(model, rows, engine=engine), truth) <= EXACT


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return input_ids * self.weight.sum()


class OfEachRow:
    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        return outputs.log_prob.sum(1)

    def __call__(self, view: Any, params: Any, records: RecordBatch) -> Tensor:
        return self.from_outputs(view(params, view.prepare(records)), records)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda model, rows: scored(model, rows, objective=None), r"`log_prob` of shape \(\d+, 4\).*TokenPPO"),
        (lambda model, rows: scored(model, rows, target=whence.Return()), "one number per record"),
        (lambda model, rows: scored(model, rows, target=OfEachRow()), r"shape \(\d+,\); a scalar tensor"),
        (lambda model, rows: scored(model, rows, target=OfEachRow(), engine="loop"), "a scalar tensor"),
        (lambda model, rows: scored(model, rows, objective=lambda said, _: said.log_prob), "one value per record"),
        (lambda model, rows: scored(model, rows, objective=TokenPPO(vf_coef=0.1)), "gives no values.*WithValueHead"),
        (lambda model, rows: scored(model, plain_records()), r"Pass it to whence\.llm\.make_rows"),
        (lambda model, rows: scored(model, plain_records(), objective=whence.PPOClip()), "no rows of a language model"),
        (lambda model, rows: scored(Encoder(), rows), "Encoder .* without `logits`"),
        (lambda model, rows: language_view(model, temperature=0), "temperature is 0"),
        (lambda model, rows: TokenPPO(clip_range=0), "clip_range is 0"),
        (lambda model, rows: register_rmsnorm(nn.LayerNorm(3)), "pass the layer's type"),
    ],
)
def test_what_cannot_be_scored_is_refused(run: Callable[..., object], message: str) -> None:
    model = language_model("gpt2")
    with pytest.raises(WhenceError, match=message):
        run(model, rows_for(model, tokens(20)))


def plain_records() -> RecordBatch:
    return RecordBatch(
        observations=torch.zeros(3, 2), actions=torch.zeros(3), log_probs=torch.zeros(3), advantages=torch.ones(3)
    )


def test_flex_attention_is_refused_by_name_also_where_it_is_set_later() -> None:
    model = language_model("llama")
    rows, view = rows_for(model), language_view(model)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(Unsupported, match=r"flex_attention.*attn_implementation='sdpa'"):
        language_view(model)
    with pytest.raises(Unsupported, match="flex_attention"):
        attribute(view, rows, target=SequenceReturn(), objective=TokenPPO(), engine="forward")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(3, 5)}, r"came as \(3, 5\) float32"),
        ({"input_ids": torch.full((3, 3), 2), "attention_mask": torch.ones(3, 3)}, "a prompt token"),
        ({"attention_mask": torch.ones(3, 4)}, r"attention_mask as \(3, 4\)"),
        ({"attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [1] * 5])}, "Row 1 .*prompt is empty"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1], [1] * 5, [1] * 5])}, "Row 0 .*response token"),
        ({"advantages": torch.zeros(3)}, r"`advantages` has shape \(3,\); .*response token"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(changes: dict[str, Tensor], message: str) -> None:
    given = {"input_ids": torch.full((3, 5), 2), "attention_mask": torch.ones(3, 5), **NUMBERS}
    with pytest.raises(InvalidRecords, match=message):
        make_rows(**(given | changes))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "whence.llm")
    with pytest.raises(Unsupported, match=r"pip install '\.\[llm\]'"):
        importlib.import_module("whence.llm")


def test_making_rules_draws_no_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a trainer that has seeded the generator before would draw other responses."""
    monkeypatch.setattr(
        rules, "_RULES", {kind: rule for kind, rule in rules._RULES.items() if kind.__module__[:5] == "torch"}
    )
    for kind in ("llama", "gpt2", "gemma2", "gemma3_text", "bart"):
        settings = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        more = {
            "num_key_value_heads": 1,
            "head_dim": 4,
            "d_model": 8,
            "decoder_attention_heads": 2,
            "scale_embedding": True,
        }
        config = AutoConfig.for_model(
            kind, vocab_size=9, **{**settings, **more, "n_embd": 8, "n_layer": 1, "n_head": 2}
        )
        model = AutoModelForCausalLM.from_config(config)
        state = torch.get_rng_state()
        language_view(model)
        assert torch.equal(state, torch.get_rng_state()), kind
