"""Scores of language models by their last blocks: passes begin at hidden states that are there already."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from languages import STYLES, language_model, rows_for
from test_llm_trainer import copy_state, make_model, make_tokenizer, make_trainer, same
from test_llm_trl import make_trainer as make_trl_trainer
from whence import IPPO, NonPositive, WhenceError, attribute
from whence.errors import Unsupported
from whence.layers import choose_parameters, find_blocks
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, ValidationLoss, language_view, row_scorer, score_tokens
from whence.llm.hidden_states import HIDDEN, begin_at_block, compute_hidden, record_hidden
from whence.llm.model import WithValueHead
from whence.llm.row_scorer import RowScorer
from whence.llm.scoring import Scoring, score
from whence.llm.trainer import PPOTrainer

EXACT = 1e-6


def make_scoring(**more: Any) -> Scoring:
    settings = {
        "target": SequenceReturn(),
        "objective": TokenPPO(),
        "temperature": 1.0,
        "engine": "auto",
        "memory": None,
    }
    return Scoring(**settings | {"chunk_size": 2, "layers": 1} | more)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def count_passes(module: Any, block: int) -> list[int]:
    """Return a list of the rows that a block's attention or feed-forward sees from now on."""
    sizes: list[int] = []
    inner = next(child for child in find_blocks(module)[1][block].modules() if isinstance(child, torch.nn.LayerNorm)
                 or "Norm" in type(child).__name__)  # fmt: skip
    inner.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return sizes


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_blocks_are_those_of_the_language_model_next_to_a_vision_tower(adapted: bool, head: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=5, image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(num_hidden_layers=3, vocab_size=50, **sizes)
    model: Any = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=49)
    )
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model = WithValueHead(model) if head else model
    path, blocks = find_blocks(model)
    assert path.endswith("language_model.layers")
    assert len(blocks) == 3
    with pytest.raises(WhenceError, match=r"from 1 to 3, the blocks of `.*language_model\.layers`"):
        choose_parameters(model, dict(model.named_parameters()), 4)
    for block in range(1, 3):  # as in models whose blocks are of several classes
        blocks[block] = torch.nn.Identity()
    with pytest.raises(WhenceError, match=r"`.*language_model` has no ModuleList"):
        find_blocks(model)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("lora", [None, 0.1])
@pytest.mark.parametrize("head", [False, True])
def test_scores_of_the_last_block_need_one_pass_through_those_below(style: str, lora: float | None, head: bool) -> None:
    model = language_model(style, lora=lora).eval()
    model = WithValueHead(model) if head else model
    rows = rows_for(model)
    whole = attribute(
        language_view(model), rows, target=SequenceReturn(), objective=TokenPPO(), layers=1, engine="loop"
    )
    below, above = count_passes(model, 0), count_passes(model, 1)
    for target in (SequenceReturn(), SequenceReturn(rows)):
        below.clear()
        influence = score(model, rows, make_scoring(target=target))
        assert apart(influence.scores, whole.scores) < EXACT
        assert influence.provenance.records == rows.fingerprint
        assert all(".1." in name for name in influence.provenance.parameters)
        if target.rows is None:
            assert sum(below) == len(rows)
    # Hidden states that are known already save this pass, too.
    hidden = compute_hidden(language_view(model), rows, 1, 4)
    below.clear()
    above.clear()
    assert apart(score(model, rows, make_scoring(), hidden).scores, whole.scores) < EXACT
    assert sum(below) == 0
    # For the target's gradient, for the products, and what is tried once on a row or two.
    assert sum(above) <= 2 * len(rows) + 3


def test_hidden_states_are_those_of_the_model() -> None:
    model = language_model("llama").eval()
    view, rows = language_view(model), rows_for(model)
    inputs = view.prepare(rows)
    with torch.no_grad():
        outputs = model(**{k: v for k, v in inputs.items() if k != "response_mask"}, output_hidden_states=True)
    assert compute_hidden(view, rows, 1, 4).equal(outputs.hidden_states[1])
    with record_hidden(model, 1) as states, torch.no_grad():
        view(view.parameters(), inputs)
    assert states[0].equal(outputs.hidden_states[1])


def test_a_model_is_as_it_was() -> None:
    model = language_model("llama").eval()
    _, blocks = find_blocks(model)
    wrapped = blocks[0].forward
    blocks[0].forward = lambda *args, **kwargs: wrapped(*args, **kwargs)  # as Accelerate does
    before = [dict(vars(block)) for block in blocks]
    hooks = [len(block._forward_pre_hooks) for block in blocks]
    rows = rows_for(model)
    score(model, rows, make_scoring())
    hidden = compute_hidden(language_view(model), rows, 1, 4)
    with pytest.raises(ZeroDivisionError), begin_at_block(model, 1, hidden):
        raise ZeroDivisionError
    assert [dict(vars(block)) for block in blocks] == before
    assert [len(block._forward_pre_hooks) for block in blocks] == hooks


def test_blocks_with_other_hidden_states_are_refused() -> None:
    model = language_model("llama").eval()
    rows, (_, blocks) = rows_for(model), find_blocks(model)
    blocks[0].register_forward_hook(
        lambda module, args, output: output[0] if isinstance(output, torch.Tensor) else output
    )
    with pytest.raises(
        Unsupported, match=r"A LlamaDecoderLayer got a tensor of shape .* \(n, tokens, width\) is needed"
    ):
        score(model, rows, make_scoring(chunk_size=8))


def test_parts_of_tokens_sum_to_scores_of_the_same_layers() -> None:
    model = language_model("qwen2").eval()
    rows = rows_for(model)
    parts = score_tokens(model, rows, target=SequenceReturn(), layers=1)
    assert apart(parts.sum(dim=1), score(model, rows, make_scoring()).scores) < 1e-5


class TestTraining:
    def test_scores_begin_where_the_old_log_probs_did(self, tmp_path, monkeypatch):
        hidden, scores = [], []

        def keep(model, rows, scoring, states=None):
            influence = score(model, rows, scoring, states)
            hidden.append(states)
            exact = attribute(
                language_view(model), rows, target=scoring.target, objective=scoring.objective, layers=1, engine="loop"
            )
            scores.append(apart(influence.scores, exact.scores))
            return influence

        monkeypatch.setattr(row_scorer, "score", keep)
        trainer = make_trainer(tmp_path, NonPositive(), layers=1)
        trainer.train()
        assert [states.shape[0] for states in hidden] == [8, 8]
        assert max(scores) < 1e-5
        assert trainer._run.directory.config["layers"] == 1

    def test_layers_are_chosen_in_the_first_round(self, tmp_path, caplog, monkeypatch):
        with caplog.at_level(logging.INFO, "whence"):
            trainer = make_trainer(tmp_path / "a", NonPositive(), layers="auto", rounds=1, batch_size=16)
            trainer.train()
        assert "From round 1 on scores are of the last 1 blocks: rank correlation 0.9" in caplog.text
        assert trainer.scorer.choice.layers == 1
        monkeypatch.setattr("whence.llm.layer_choice.AGREEMENT", 1.1)
        with caplog.at_level(logging.INFO, "whence"):
            trainer = make_trainer(tmp_path / "b", NonPositive(), layers="auto", rounds=1, batch_size=16)
            trainer.train()
        assert trainer.scorer.choice.layers is None
        assert "on scores are of all layers: those of fewer blocks have a rank correlation below 1.10" in caplog.text

    def test_scores_without_an_order_choose_no_layers(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            "whence.llm.layer_choice.score", lambda model, rows, how: SimpleNamespace(scores=torch.zeros(len(rows)))
        )
        trainer = make_trainer(tmp_path, NonPositive(), layers="auto", rounds=2, batch_size=16)
        trainer.train()
        assert trainer.scorer.choice.state_dict() == {"layers": None, "chosen_in": 0}

    def test_layers_are_chosen_anew_when_the_rounds_have_doubled(self, tmp_path, monkeypatch):
        choices, scored = iter([1, None, 1]), []
        monkeypatch.setattr("whence.llm.layer_choice._choose_blocks", lambda *args: next(choices))

        def keep(model, rows, scoring, hidden=None):
            scored.append((scoring.layers, hidden is not None))
            return score(model, rows, scoring, hidden)

        monkeypatch.setattr(row_scorer, "score", keep)
        trainer = make_trainer(tmp_path, NonPositive(), layers="auto", rounds=5, batch_size=16)
        trainer.train()
        # In the rounds 1, 2 and 4 it is not known before scoring which hidden states to keep.
        assert scored == [(1, False), (None, False), (None, False), (1, False), (1, True)]
        assert next(choices, "none left") == "none left"

    def test_a_choice_goes_on_with_the_training(self, tmp_path, monkeypatch):
        monkeypatch.setattr("whence.llm.layer_choice.AGREEMENT", 0.5)
        whole = make_trainer(tmp_path / "whole", NonPositive(), layers="auto", rounds=4, batch_size=16)
        whole.train()
        first = make_trainer(
            tmp_path / "broken", NonPositive(), layers="auto", rounds=4, batch_size=16, on_rollout=raise_in_round_3
        )
        with pytest.raises(KeyboardInterrupt):
            first.train()
        again = make_trainer(tmp_path / "broken", NonPositive(), layers="auto", rounds=4, batch_size=16)
        again.train()
        assert again.scorer.choice.state_dict() == whole.scorer.choice.state_dict() == {"layers": 1, "chosen_in": 4}
        assert same(copy_state(whole), copy_state(again))

    def test_layers_that_are_not_there_are_refused_before_training(self, tmp_path):
        with pytest.raises(WhenceError, match="layers is 3; a number from 1 to 2"):
            make_trainer(tmp_path, NonPositive(), layers=3)
        with pytest.raises(WhenceError, match=r"pattern '\*lora\*'"):
            make_trainer(tmp_path, NonPositive(), layers="*lora*")

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    @pytest.mark.parametrize("layers", [1, "auto"])
    def test_trainers_of_trl(self, kind, layers, tmp_path):
        trainer = make_trl_trainer(kind, tmp_path, NonPositive(), target=TokenReturn(), layers=layers)
        batches, score_rows = [], trainer._score_rows

        def score_and_compare(rows):
            influence = score_rows(rows)
            exact = attribute(
                language_view(trainer.model, temperature=trainer.temperature), rows, target=trainer.target,
                objective=trainer.influence_objective, layers=trainer.scorer.choice.layers, engine="loop",
            )  # fmt: skip
            batches.append(apart(influence.scores, exact.scores))
            return influence

        trainer._score_rows = score_and_compare
        trainer.train()
        assert batches
        assert max(batches) < 1e-4
        assert bool(trainer.scorer.choice.chosen_in) == (layers == "auto")


DEMONSTRATIONS = [{"prompt": "ab", "completion": "cc"}, {"prompt": "c", "completion": "aei"}] * 3


class TestRefresh:
    def train(self, folder: Any, **more: Any) -> tuple[Any, list[float]]:
        """Train, and return how far each round's scores are from those by the target at the present model."""
        target = ValidationLoss.of(DEMONSTRATIONS, make_tokenizer(), batch_size=2)
        distances: list[float] = []
        scorer_score = RowScorer.score

        def score_and_compare(scorer, model, rows, number, make_target=None, hidden=None):
            influence = scorer_score(scorer, model, rows, number, make_target, hidden)
            exact = attribute(language_view(model), rows, target=target, objective=TokenPPO(), engine="loop")
            distances.append(apart(influence.scores, exact.scores))
            return influence

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowScorer, "score", score_and_compare)
            trainer = make_trainer(folder, IPPO(), target=target, rounds=4, **more)
            trainer.train()
        return trainer, distances

    def test_the_gradient_is_that_of_the_last_due_round(self, tmp_path):
        _, distances = self.train(tmp_path / "a", refresh_target_every=2)
        assert max(distances[0], distances[2]) < 1e-5
        assert min(distances[1], distances[3]) > 1e-3
        _, distances = self.train(tmp_path / "b")
        assert max(distances) < 1e-5

    def test_a_kept_gradient_goes_on_with_the_training(self, tmp_path):
        whole, _ = self.train(tmp_path / "whole", refresh_target_every=3)
        with pytest.raises(KeyboardInterrupt):
            self.train(tmp_path / "broken", refresh_target_every=3, on_rollout=raise_in_round_3)
        again, _ = self.train(tmp_path / "broken", refresh_target_every=3)
        assert same(copy_state(whole), copy_state(again))
        assert whole._run.directory.config["refresh_target_every"] == 3

    def test_held_out_prompts_are_answered_only_where_they_are_due(self, tmp_path, monkeypatch):
        answered = []
        target_of_round = PPOTrainer._target_of_round
        monkeypatch.setattr(
            PPOTrainer, "_target_of_round", lambda *args: answered.append(args[1]) or target_of_round(*args)
        )
        make_trainer(tmp_path, NonPositive(), held_out=["ba", "jj"], rounds=4, refresh_target_every=3).train()
        assert answered == [1, 4]

    def test_fewer_layers_than_the_gradient_has(self, tmp_path):
        target = ValidationLoss.of(DEMONSTRATIONS, make_tokenizer(), batch_size=2)
        trainer = make_trainer(
            tmp_path, IPPO(), target=target, rounds=3, batch_size=16, refresh_target_every=3, layers="auto"
        )
        trainer.train()
        assert trainer.scorer.choice.chosen_in

    def test_a_target_that_is_new_in_each_round_is_refused(self, tmp_path):
        with pytest.raises(
            WhenceError, match=r"refresh_target_every is 2, and SequenceReturn\(\) is over the scored rows"
        ):
            make_trainer(tmp_path, NonPositive(), refresh_target_every=2)
        with pytest.raises(WhenceError, match="refresh_target_every is 0; a number of rounds, 1 or more, is needed"):
            make_trainer(tmp_path, NonPositive(), refresh_target_every=0)

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    def test_trainers_of_trl(self, kind, tmp_path):
        target = ValidationLoss.of(DEMONSTRATIONS, make_tokenizer(), batch_size=2)
        trainer = make_trl_trainer(kind, tmp_path, NonPositive(), target=target, refresh_target_every=100, max_steps=8)
        names, score_rows = [], trainer._score_rows
        trainer._score_rows = lambda rows: names.append(score_rows(rows).provenance.target) or score_rows(rows)
        trainer.train()
        assert len(names) > 1
        assert set(names) == {f"{target!r} of round 1"}


class TestAutocast:
    def test_scores_in_bfloat16(self, tmp_path, monkeypatch):
        distances = []

        def score_and_compare(model, rows, scoring, hidden=None):
            assert torch.is_autocast_enabled("cpu")
            influence = score(model, rows, scoring, hidden)
            with torch.autocast("cpu", enabled=False):
                exact = score(model, rows, scoring)
            distances.append(apart(influence.scores, exact.scores))
            return influence

        monkeypatch.setattr(row_scorer, "score", score_and_compare)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = make_trainer(tmp_path, NonPositive(), autocast=True)
        trainer.train()
        AcceleratorState._reset_state(reset_partial_state=True)
        assert 1e-4 < max(distances) < 0.1
        assert trainer._run.directory.config["autocast"] is True

    def test_float16_is_refused(self, tmp_path):
        scoring, accelerator = make_scoring(), SimpleNamespace(mixed_precision="fp16")
        with pytest.raises(WhenceError, match="which is float16: small gradients would be 0 there"):
            RowScorer(scoring, make_model(), accelerator, layers=None, refresh_target_every=1, autocast=True)


def raise_in_round_3(rollout, influence, selection, row):
    if row["round"] == 3:
        raise KeyboardInterrupt


def test_more_rows_at_a_time_where_passes_are_shorter() -> None:
    model = make_model(num_hidden_layers=4).eval()
    rows = rows_for_small(model)
    sizes = count_passes(model, 3)
    score(model, rows, make_scoring(chunk_size=1, layers=1))
    assert max(sizes) == 4
    sizes.clear()
    score(model, rows, make_scoring(chunk_size=1, layers=2))
    assert max(sizes) == 2


def rows_for_small(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 12, (8, 7), generator=generator)
    mask = torch.ones(8, 3, dtype=torch.bool)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    return rows_for(model, given)


def test_a_column_of_hidden_states_is_of_the_rows_in_their_order() -> None:
    model = language_model("llama").eval()
    view, rows = language_view(model, first_block=1), rows_for(model)
    hidden = compute_hidden(view, rows, 1, 4)
    with_hidden = rows.with_columns({"observations": {**rows.observations, HIDDEN: hidden}})
    order = torch.tensor([4, 0, 2])
    with torch.no_grad():
        one = view(view.parameters(), view.prepare(with_hidden.take(order))).log_prob
        other = view(view.parameters(), view.prepare(rows.take(order))).log_prob
    torch.testing.assert_close(one, other)
