"""Answers to sample prompts: what is stored while a language model trains, and what its page shows."""

import polars as pl
import torch

from helpers.language_training import (
    PROMPTS,
    copy_state,
    make_config,
    make_model,
    make_tokenizer,
    make_trainer,
    same,
    vowels,
)
from whence.llm.text import answer_prompts, read_prompts
from whence.page import ExploredRun
from whence.page.content.responses import read_answers
from whence.runs import RunDirectory


def answer_plainly(model, tokenizer, prompt, longest):
    """Return the text of the likeliest token after another."""
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(longest):
        with torch.no_grad():
            ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def table_of(prompts, responses, rewards):
    return pl.DataFrame({"prompt": prompts, "response": responses, "reward": rewards})


class TestAnswers:
    def test_they_are_the_likeliest_tokens_with_their_rewards(self, tmp_path):
        model, tokenizer, config = make_model().train(), make_tokenizer(), make_config(tmp_path, temperature=2.0)
        prompts = read_prompts(PROMPTS, tokenizer, config, 32)
        torch.manual_seed(7)
        generator = torch.get_rng_state()
        table = answer_prompts(model, tokenizer, prompts, vowels, config)
        assert torch.equal(torch.get_rng_state(), generator)
        assert model.training
        model.eval()
        expected = [answer_plainly(model, tokenizer, prompt, config.max_new_tokens) for prompt in PROMPTS]
        assert table["prompt"].to_list() == [tokenizer.decode(list(ids)) for ids in prompts.ids]
        assert table["response"].to_list() == expected
        assert table["reward"].to_list() == vowels(PROMPTS, expected)

    def test_they_change_nothing_of_the_training(self, tmp_path):
        metrics, states = [], []
        for name, more in (("with", {"sample_prompts": ["ab", "f"]}), ("without", {})):
            trainer = make_trainer(tmp_path / name, **more)
            metrics.append(trainer.train())
            states.append(copy_state(trainer))
        assert metrics[0] == metrics[1]
        assert same(*states)
        run = RunDirectory.open(tmp_path / "with")
        assert run.rounds("answers") == [0, 1, 2]
        assert run.round("answers", 0)["prompt"].to_list() == ["a b", "f"]
        assert RunDirectory.open(tmp_path / "without").rounds("answers") == []

    def test_the_first_are_the_start_models_and_the_last_the_trained_ones(self, tmp_path):
        trainer = make_trainer(tmp_path, sample_prompts=["ab", "f"], eval_every=2, learning_rate=0.1)
        about = trainer.tokenizer, trainer.sample_prompts, vowels, trainer.config
        start = answer_prompts(trainer.model.language_model, *about)
        trainer.train()
        run = RunDirectory.open(tmp_path)
        end = answer_prompts(trainer.model.language_model, *about)
        assert run.rounds("answers") == [0, 2]
        assert run.round("answers", 0).equals(start)
        assert run.round("answers", 2).equals(end)
        assert not start.equals(end)


class TestPage:
    def test_answers_of_all_checkpoints_stand_in_the_order_of_the_prompts(self, tmp_path):
        runs = {}
        for name, reward in (("ppo", 0.25), ("ippo", 1.0)):
            runs[name] = RunDirectory.create(tmp_path / name, {"kind": "language"})
            runs[name].write_round("answers", 0, table_of(["p", "q"], ["a", "b"], [0.0, None]))
            runs[name].write_round("answers", 4, table_of(["z", "p"], ["c", f"of {name}"], [1.0, reward]))
        runs["bare"] = RunDirectory.create(tmp_path / "bare", {"kind": "language"})
        shown = read_answers([ExploredRun(run, name) for name, run in runs.items()], notes := [])
        assert (shown["prompts"], notes) == (["p", "q", "z"], [])
        sources = [(one["run"], one["round"]) for one in shown["sources"]]
        assert sources == [("ppo", 0), ("ppo", 4), ("ippo", 0), ("ippo", 4)]
        assert shown["sources"][0]["answers"] == [{"text": "a", "reward": 0.0}, {"text": "b", "reward": None}, None]
        assert [one and one["text"] for one in shown["sources"][3]["answers"]] == ["of ippo", None, "c"]
        assert read_answers([ExploredRun(runs["bare"])], notes) is None

    def test_many_checkpoints_are_spread(self, tmp_path):
        run = RunDirectory.create(tmp_path / "run", {"kind": "language"})
        for number in range(30):
            run.write_round("answers", number, table_of(["p"], [str(number)], [0.0]))
        shown = read_answers([ExploredRun(run)], [])
        assert [one["round"] for one in shown["sources"]][::11] == [0, 29]
        assert len(shown["sources"]) == 12
        many = read_answers([ExploredRun(run)] * 5, [])
        assert [one["round"] for one in many["sources"]] == [0, 29] * 5
