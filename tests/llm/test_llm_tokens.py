"""Scores taken apart: by tokens against plain autograd of each token's term, and by the target's rows."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from helpers.gradients import clip_surrogate
from helpers.languages import alone, language_model, rows_for, scored, shaken, tokens
from whence import RecordBatch, Unsupported, WhenceError, attribute
from whence.core import NonFinite
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, ValidationLoss, language_view, score_tokens
from whence.llm.base import WithValueHead
from whence.llm.scores import GroupObjective, score_target_rows
from whence.llm.text import split_text

EXACT = 1e-4


def by_plain_autograd(model: nn.Module, rows: RecordBatch, target: Tensor) -> Tensor:
    """Each token's product: its own clipped term over the response's length, against the target, by its own pass."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    of_target = torch.autograd.grad(target, parameters)
    parts = torch.zeros(rows.observations["response_mask"].shape)
    for row in range(len(rows)):
        log_probs, own = alone(model, rows, row)
        old, advantages = (rows.observations[name][row][own] for name in ("log_probs", "advantages"))
        for token in range(len(old)):
            term = clip_surrogate(log_probs[token], old[token], advantages[token]) / len(old)
            found = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
            products = [(g * t).sum() for g, t in zip(found, of_target, strict=True) if g is not None]
            parts[row, token] = torch.stack(products).sum()
    return parts


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize(
    ("style", "lora"),
    [
        *(("llama", 0.1), ("qwen3", None)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("gpt2", None), ("gpt2", 0.0), ("llama", None))),
    ],
)
def test_parts_and_scores_are_those_of_a_pass_for_each_token_without_padding(style: str, lora: float | None) -> None:
    model = language_model(style, lora=lora).eval()
    rows, given = rows_for(model), tokens()
    demonstrations = ValidationLoss(**given, batch_size=4)
    sequence = sum(alone(model, rows, row)[0].sum() * rows.advantages[row] for row in range(len(rows))) / len(rows)
    likelihood = sum(alone(model, demonstrations.rows, row)[0].sum() for row in range(6))
    likelihood = likelihood / given["response_mask"].sum()
    for target, value in ((SequenceReturn(), sequence), (demonstrations, likelihood)):
        expected = by_plain_autograd(model, rows, value)
        model.train()
        parts = score_tokens(model, rows, target=target, chunk_size=4)
        assert all(module.training for module in model.modules())
        model.eval()
        assert apart(parts, expected) <= EXACT
        for engine in ("loop", "ghost"):
            scores = scored(model, rows, target=target, engine=engine).scores
            assert apart(scores, expected.sum(dim=1)) <= EXACT
            assert apart(parts.sum(dim=1), scores) <= EXACT
            assert scores[-1] == 0, "the last row has no response"
        assert (parts[~rows.observations["response_mask"]] == 0).all()
        assert (parts != 0).sum() > 6  # and not all in one token of a response


def assert_parts_sum(model: nn.Module, rows: RecordBatch, chunk_size: int = 16, **more: Any) -> None:
    settings = {"target": SequenceReturn(), **more}
    parts = score_tokens(model, rows, chunk_size=chunk_size, **settings)
    assert apart(parts.sum(dim=1), scored(model, rows, engine="loop", **settings).scores) <= EXACT


OBJECTIVES = {
    "entropy": TokenPPO(ent_coef=0.1),
    "values": TokenPPO(vf_coef=0.1, ent_coef=0.1),
    "mean": GroupObjective("mean", 0.1),
    "sum": GroupObjective("sum", 0.1, corrected=True),
    "sequence": GroupObjective("mean", 0.1, corrected=True, level="sequence", ratio_cap=0.2),
}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        # That of values has an entropy, too.
        *(
            pytest.param(name, None, marks=pytest.mark.long if name in ("entropy", "values") else ())
            for name in OBJECTIVES
        ),
        *(pytest.param(name, 0.0, marks=() if name == "values" else pytest.mark.long) for name in OBJECTIVES),
    ],
)
def test_parts_of_any_objective_sum_to_the_score(name: str, lora: float | None) -> None:
    model = shaken(WithValueHead(language_model("llama", lora=lora)))
    rows, objective, target = rows_for(model), OBJECTIVES[name], TokenReturn()
    drawn = rows.observations["log_probs"] + 0.1
    rows = rows.with_columns({"observations": {**rows.observations, "ref_log_probs": drawn}})
    assert_parts_sum(model, rows, target=target, objective=objective, chunk_size=2)


def test_an_objective_that_is_no_sum_over_tokens_is_split_by_the_chain_rule() -> None:
    def of_whole_responses(outputs: Any, records: RecordBatch) -> Tensor:
        old = records.observations["log_probs"]
        return clip_surrogate(outputs.log_prob.sum(dim=1), old.sum(dim=1), records.advantages)

    model = language_model("gpt2")
    rows = rows_for(model, spread=0.05)
    assert_parts_sum(model, rows, objective=of_whole_responses)


def test_parts_are_right_where_padding_is_read() -> None:
    batch = tokens()
    batch["input_ids"][0, 2] = 0  # the token of padding, whose embedding is also the output layer's weight
    model = language_model("qwen2")
    assert_parts_sum(model, rows_for(model, batch))


def test_models_whose_gradients_hooks_change_have_no_parts() -> None:
    model = language_model("llama")
    model.model.norm.register_full_backward_pre_hook(lambda layer, gradients: (gradients[0].clamp(min=0),))
    with pytest.raises(Unsupported, match="forward mode"):
        score_tokens(model, rows_for(model), target=SequenceReturn())


def test_neither_chunks_nor_order_make_a_difference() -> None:
    model = language_model("qwen3")
    rows, order = rows_for(model, tokens(20)), torch.randperm(20)
    target = SequenceReturn(rows_for(model), batch_size=4)
    whole = score_tokens(model, rows, target=target, chunk_size=20)
    assert apart(score_tokens(model, rows.take(order), target=target, chunk_size=3), whole[order]) <= EXACT


def test_the_temperature_counts() -> None:
    model = language_model("llama")
    rows, target = rows_for(model, spread=0.0), SequenceReturn()
    view = language_view(model, temperature=0.5)
    scores = attribute(view, rows, target=target, objective=GroupObjective()).scores
    parts = score_tokens(model, rows, target=target, objective=GroupObjective(), temperature=0.5)
    assert apart(parts.sum(dim=1), scores) <= EXACT


def test_what_is_refused() -> None:
    model = language_model("gpt2")
    rows = rows_for(model)
    with pytest.raises(WhenceError, match="is no mean over rows"):
        score_target_rows(model, rows, 0, target=lambda view, params, records: params["lm_head.weight"].sum())
    columns = {**rows.observations, "advantages": rows.observations["advantages"] * torch.inf}
    with pytest.raises(NonFinite, match="score of record 0 is not finite"):
        score_tokens(model, rows.with_columns({"observations": columns}), target=SequenceReturn())


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.long), 0.1])
def test_parts_of_the_targets_rows_sum_to_the_score(lora: float | None) -> None:
    model = language_model("llama", lora=lora)
    rows = rows_for(model)
    targets = {
        "sequence": SequenceReturn(),
        "token": TokenReturn(),
        "held out": TokenReturn(rows_for(model, tokens(4)), batch_size=3),
        "validation": ValidationLoss(**tokens(5), batch_size=2),
    }
    for name, target in targets.items():
        scores = scored(model, rows, target=target).scores
        for position in (3, 5):
            parts = score_target_rows(model, rows, position, target=target, chunk_size=2)
            assert len(parts) == {"held out": 4, "validation": 5}.get(name, 6)
            assert float((parts.sum() - scores[position]).abs() / scores.abs().max()) <= EXACT
    assert parts.tolist() == [0] * 5  # of an empty response


def test_a_part_of_a_targets_row_is_the_score_by_this_row_alone() -> None:
    model = language_model("gpt2")
    rows, given = rows_for(model), tokens(3, empty=False)
    parts = score_target_rows(model, rows, 1, target=ValidationLoss(**given))
    lengths = given["response_mask"].sum(dim=1)
    for row in range(3):
        alone = ValidationLoss(**{name: column[row : row + 1] for name, column in given.items()})
        score = scored(model, rows, target=alone).scores[1]
        assert float(parts[row]) == pytest.approx(float(score * lengths[row] / lengths.sum()), rel=1e-3)


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, so that one character may take several; and "an" in one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["</s>", *alphabet, "an"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "n")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_a_character_belongs_to_its_last_token() -> None:
    tokenizer = make_byte_tokenizer()
    ids = [*tokenizer("aé an\n🙂b")["input_ids"], 0]
    texts = split_text(tokenizer, ids)
    assert texts == ["a", "", "é", " ", "an", "\n", "", "", "", "🙂", "b", "</s>"]
    assert len(texts) == len(ids)
    # Half a character at the end is shown as such.
    assert split_text(tokenizer, tokenizer("an🙂")["input_ids"][:3]) == ["an", "", "\N{REPLACEMENT CHARACTER}"]
    assert split_text(tokenizer, []) == []
