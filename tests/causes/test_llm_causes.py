"""What taught a language model a response: scores of all rounds, the simple rules beside them, the command."""

import hashlib
import importlib
import json
import math
import random
import shutil
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import datasets
import numpy as np
import polars as pl
import pytest
import torch
from torch.nn.functional import normalize

from helpers.gradients import differentiate
from helpers.language_runs import RUNS, assert_refused, copy_run, invoke, tiny
from helpers.language_training import CHAT, make_model, make_tokenizer, make_trainer
from whence import NonPositive
from whence.causes import Examples, find_causes, rank_records
from whence.causes.response_causes import K1, B, measure_trained, rank_bm25, split_terms
from whence.core import RunDirectoryError, Unsupported, WhenceError, eval_mode
from whence.lab.language.training import run
from whence.llm import language_view
from whence.runs import RunDirectory, write_flag
from whence.selection import read_weights
from whence.stored.language.policies import list_policies
from whence.stored.language.rounds import _list_prompt_widths, rebuild_round
from whence.stored.language.tasks import make_response_target

pytestmark = pytest.mark.usefixtures("laboratory_cache")
QUESTION = "5-1?", "5-1=5;5"
EXAMPLES = [QUESTION, *((f"{a}+{b}?", f"{a}+{b}={a + b};{a + b}") for a in range(3, 7) for b in (2, 3, 9))]
"""Thirteen, of several lengths: more than the ten that count."""


def rebuild(directory, number):
    return rebuild_round(directory, number, make_target=partial(make_response_target, examples=[QUESTION]))


def compute_log_prob(rebuilt, question=QUESTION):
    """The log-probability of a response, from the logits of a model; it can be differentiated."""
    tokenizer, model = rebuilt.tokenizer, rebuilt.model
    prompt, response = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in question)
    ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
    with eval_mode(model.modules()):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] / rebuilt.scoring.temperature
    log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return log_probs[torch.arange(len(response) + 1), ids[0, len(prompt) :]].sum(), len(response) + 1


def list_trained(rebuilt):
    return [parameter for parameter in rebuilt.model.parameters() if parameter.requires_grad]


def differentiate_row(rebuilt, position, objective=None):
    """Return the gradient of a row's objective, by default its log-probability."""
    view, row = language_view(rebuilt.model, temperature=rebuilt.scoring.temperature), rebuilt.rows.take([position])
    row = row if objective is None else objective.prepare(row)
    with eval_mode(rebuilt.model.modules()):
        outputs = view(view.parameters(), view.prepare(row))
        value = outputs.log_prob.sum() if objective is None else objective(outputs, row)[0]
        return differentiate(value, list_trained(rebuilt))


def score_by_loop(rebuilt, table, examples):
    """Return each record's score by examples whose tokens count alike; and the examples' mean log-probability."""
    log_probs, tokens = zip(*(compute_log_prob(rebuilt, each) for each in examples), strict=True)
    gradient = differentiate(sum(log_probs) / sum(tokens), list_trained(rebuilt))
    rows = (differentiate_row(rebuilt, at, rebuilt.scoring.objective) for at in range(len(table)))
    scores = np.array([float(gradient @ row) for row in rows]) * read_weights(table)
    return scores, sum(log_probs).item() / len(examples)


class TestScores:
    @pytest.mark.parametrize(
        ("name", "examples", "rounds"),
        [
            pytest.param("ppo", EXAMPLES, [1, 2, 3], id="ppo-many"),
            *(
                pytest.param(name, [QUESTION], [3], id=f"{name}-one", marks=() if name == "grpo" else pytest.mark.long)
                for name in RUNS
            ),
        ],
    )
    def test_a_plain_loop_over_records_gives_the_same(self, runs, name, examples, rounds):
        directory = runs(name)
        causes = find_causes(directory, Examples(*zip(*examples, strict=True)), rounds=rounds)
        assert causes["round"].unique().to_list() == rounds
        for number in rounds:
            rebuilt, table = rebuild(directory, number), directory.round("records", number)
            expected, log_prob = score_by_loop(rebuilt, table, examples)
            rows = causes.filter(round=number)
            assert rows["score"].to_numpy() == pytest.approx(expected, abs=1e-5 * abs(expected).max())
            assert abs(expected).max() > 0
            for column in ("record_id", "prompt", "response", "reward", "advantage", "keep"):
                assert rows[column].to_list() == table[column].to_list()
            assert rows["log_prob"].unique().to_list() == [pytest.approx(log_prob, rel=1e-5)]

    def test_nothing_changes(self, runs, tmp_path, monkeypatch):
        directory = runs("ppo")
        # bm25s draws when it is imported, if JAX is there.
        (tmp_path / "bm25s.py").write_text("import numpy as np\nnp.random.rand()\nfrom bm25s_itself import BM25\n")
        monkeypatch.setitem(sys.modules, "bm25s_itself", importlib.import_module("bm25s"))
        monkeypatch.delitem(sys.modules, "bm25s")
        monkeypatch.syspath_prepend(tmp_path)

        def look():
            files = sorted(path for path in directory.path.rglob("*") if path.is_file())
            generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
            return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}, generators

        before = look()
        for method in ("influence", "nearest", "bm25"):
            find_causes(directory, Examples(*QUESTION), method=method)
        measure_trained(directory, Examples(*QUESTION))
        assert look() == before

    def test_rounds_without_their_policy_are_left_out(self, runs, tmp_path):
        for name, file, how in (
            ("ppo", "checkpoints/round_00001.safetensors", '"keep_checkpoints": 3'),
            ("grpo", "trl/checkpoint-2", '"save_strategy": "steps"'),
        ):
            directory = copy_run(runs(name), tmp_path / name)
            path = directory.path / file
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            policies = list_policies(directory)
            assert (policies.rounds, policies.missing) == ([1, 3], [2])
            assert how in policies.remedy
            assert find_causes(directory, Examples(*QUESTION))["round"].unique().to_list() == [1, 3]
            assert find_causes(directory, Examples(*QUESTION), method="bm25")["round"].unique().to_list() == [1, 2, 3]
            with pytest.raises(RunDirectoryError, match=r"The policies of rounds 2 of .* were not kept") as refusal:
                find_causes(directory, Examples(*QUESTION), rounds=[1, 2], method="nearest")
            assert how in str(refusal.value)

    @pytest.mark.parametrize(
        "name",
        [*("ppo", "grpo"), *(pytest.param(name, marks=pytest.mark.long) for name in ("an adapter by tokens", "rloo"))],
    )
    def test_the_trained_model_is_the_last_rounds(self, runs, tmp_path, name):
        directory = copy_run(runs(name), tmp_path / name)
        # A fourth round, copied, is built again with the policy after the third.
        table = directory.round("records", 3)
        directory.write_round("records", 4, table)
        directory.append("metrics", directory.table("metrics").row(-1, named=True) | {"round": 4})
        expected, _ = compute_log_prob(rebuild(directory, 4))
        assert measure_trained(directory, Examples(*QUESTION)) == pytest.approx(expected.item(), rel=1e-5)
        first, _ = compute_log_prob(rebuild(directory, 1))
        assert abs(expected.item() - first.item()) > 1e-3
        shutil.rmtree(directory.path / "model")
        assert measure_trained(directory, Examples(*QUESTION)) is None

    @pytest.mark.parametrize(
        ("arm", "more"), [("iif", {"held_out": 8}), pytest.param("iif-objective", {}, marks=pytest.mark.long)]
    )
    def test_a_run_whose_own_target_was_drawn(self, tmp_path, arm, more):
        run(tiny(arm, **more, settings={"batch_size": 32, "rounds": 1}), tmp_path)
        directory = RunDirectory.open(tmp_path)
        with pytest.raises(Unsupported, match="in each round and not kept"):
            rebuild_round(directory, 1)
        table = directory.round("records", 1)
        directory.write_round("records", 1, table.with_columns(weight=pl.lit(1.0)))
        causes = find_causes(directory, Examples(*QUESTION))
        assert causes["score"].abs().max() > 0


TEXTS = ("a cat sat on a mat", "The cat, the CAT!", "dogs", "7+8=15;15", "")


def test_bm25_by_its_formula():
    terms = [split_terms(text) for text in TEXTS]
    assert terms[1] == ["the", "cat", ",", "the", "cat", "!"]
    assert terms[3] == ["7", "+", "8", "=", "15", ";", "15"]
    average = np.mean([len(document) for document in terms])

    def compute(document, query):
        total, counts = 0.0, Counter(document)
        for term in query:
            containing = sum(term in other for other in terms)
            weight = math.log(1 + (len(terms) - containing + 0.5) / (containing + 0.5))
            length = 1 - B + B * len(document) / average
            total += weight * counts[term] / (counts[term] + K1 * length)
        return total

    for question in ("cat", "cat cat mat", "15 - 7 unicorns", "the dogs"):
        expected = [compute(document, split_terms(question)) for document in terms]
        assert rank_bm25(TEXTS, question) == pytest.approx(expected, rel=1e-5)
    best = np.maximum(rank_bm25(TEXTS, "mat"), rank_bm25(TEXTS, "15"))
    assert rank_bm25(TEXTS, "mat", "unicorns", "15").tolist() == best.tolist()
    assert (best > 0).tolist() == [True, False, False, True, False]
    assert rank_bm25(TEXTS, "unicorns").tolist() == [0] * 5
    assert rank_bm25(TEXTS, "").tolist() == [0] * 5


def test_without_the_package_of_bm25(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(Unsupported, match="pip install bm25s"):
        rank_bm25(TEXTS, "cat")


class TestRules:
    def test_advantage_times_bm25_over_all_rounds(self, runs):
        directory = runs("ppo")
        tables = pl.concat([directory.round("records", number) for number in directory.rounds()])
        texts = [f"{prompt}\n{response}" for prompt, response in tables.select("prompt", "response").rows()]
        expected = rank_bm25(texts, "\n".join(QUESTION)) * tables["advantage"].to_numpy() * read_weights(tables)
        causes = find_causes(directory, Examples(*QUESTION), method="bm25")
        assert causes["score"].to_numpy() == pytest.approx(expected)
        assert causes["log_prob"].null_count() == len(causes)
        part = find_causes(directory, Examples(*QUESTION), method="bm25", rounds=[2])
        assert part["record_id"].to_list() == directory.round("records", 2)["record_id"].to_list()

    @pytest.mark.parametrize(
        ("name", "examples"),
        [
            pytest.param(name, examples, id=f"{name}-{count}", marks=() if count in short else pytest.mark.long)
            for name, short in (("ppo", ["many"]), ("an adapter by tokens", []), ("grpo", []))
            for count, examples in (("one", [QUESTION]), ("many", EXAMPLES))
        ],
    )
    def test_advantage_times_cosine_of_gradients(self, runs, name, examples):
        directory = runs(name)
        causes = find_causes(directory, Examples(*zip(*examples, strict=True)), method="nearest", rounds=[1, 3])
        for number in (1, 3):
            rebuilt, table = rebuild(directory, number), directory.round("records", number)
            rows = [differentiate_row(rebuilt, position) for position in range(len(table))]
            asked = [differentiate(compute_log_prob(rebuilt, each)[0], list_trained(rebuilt)) for each in examples]
            ones, others = (normalize(torch.stack(each)) for each in (rows, asked))
            cosines = (ones @ others.T).sort(dim=1, descending=True).values[:, :10]
            expected = cosines.mean(dim=1).numpy() * table["advantage"].to_numpy() * read_weights(table)
            scores = causes.filter(round=number)["score"].to_numpy()
            assert scores == pytest.approx(expected, abs=1e-5 * abs(expected).max())

    def test_bm25_of_several_is_the_best_match(self, runs):
        directory, pairs = runs("ppo"), EXAMPLES[:3]
        causes = [find_causes(directory, Examples(*each), method="bm25") for each in (*pairs, zip(*pairs, strict=True))]
        *alone, together = (each["score"].to_numpy() / each["advantage"].to_numpy() for each in causes)
        assert together == pytest.approx(np.max(alone, axis=0), rel=1e-6)
        assert len({each.argmax() for each in alone}) > 1


class TestExamples:
    @pytest.mark.parametrize("method", ["influence", pytest.param("nearest", marks=pytest.mark.long), "bm25"])
    def test_stored_responses_are_asked_by_their_tokens_and_left_out(self, runs, method):
        directory = runs("ppo")
        table = directory.round("records", 2)
        pairs = table.filter("ended").select("record_id", "prompt", "response").rows()[:3]
        records = pl.DataFrame({"round": 2, "record_id": [record for record, *_ in pairs]})
        texts = zip(*(pair[1:] for pair in pairs), strict=True)
        of_texts = find_causes(directory, Examples(*texts), method=method)
        of_records = find_causes(directory, records, method=method)
        expected = of_texts.join(records, on=["round", "record_id"], how="anti")
        assert len(expected) == len(of_texts) - 3
        assert of_records["record_id"].to_list() == expected["record_id"].to_list()
        assert of_records["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), rel=1e-4, abs=1e-6)
        with pytest.raises(WhenceError, match=r"Nothing of .* is flagged.*whence view"):
            find_causes(directory, records.clear(), method=method)


def test_prompt_widths_of_processes_by_hand():
    table = pl.DataFrame({"prompt_ids": [[1], [1, 2, 3], [1, 2], [1]]})
    assert _list_prompt_widths(table, 1, None).tolist() == [3, 3, 3, 3]
    assert _list_prompt_widths(table, 2, None).tolist() == [3, 3, 2, 2]
    assert _list_prompt_widths(table, 2, 4).tolist() == [4, 4, 4, 4]


class TestQuestions:
    def make_task(self, prompts, **more):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT
        prompts = datasets.Dataset.from_dict({"prompt": prompts})
        return SimpleNamespace(tokenizer=tokenizer, prompts=prompts, model=make_model(**more))

    def test_a_text_is_asked_as_the_runs_prompts_are(self):
        chat = [[{"role": "user", "content": "ab"}]]
        for prompts, question, ids in (
            (["cd"], ("ab", "cc"), [2, 3, 4, 4, 1]),
            (chat, ("ab", "cc"), [2, 3, 11, 4, 4, 1]),
            (chat, (chat[0], "cc"), [2, 3, 11, 4, 4, 1]),
        ):
            target = make_response_target(self.make_task(prompts), [question])
            assert target.rows.observations["input_ids"].tolist() == [ids]

    def test_what_cannot_be_asked(self, runs):
        for question, message in (
            (("five?", "5"), r"does not know all characters: it reads prompt and response as '<unk>"),
            (("", "5"), "has no token"),
            (("5-1?", "5" * 200), r"have 205 tokens, and the model reads at most 128"),
        ):
            with pytest.raises(WhenceError, match=message):
                find_causes(runs("ppo"), Examples(*question))

    def test_a_run_of_a_script(self, tmp_path):
        make_trainer(tmp_path, NonPositive(), rounds=1).train()
        directory = RunDirectory.open(tmp_path)
        with pytest.raises(WhenceError, match=r"rounds 1 of .* were not kept.*--by bm25"):
            find_causes(directory, Examples("ab", "cc"))
        assert len(find_causes(directory, Examples("ab", "cc"), method="bm25")) == len(directory.round("records", 1))


@pytest.fixture(scope="module")
def nearest(runs):
    """What taught the answer to the question, by the nearest gradients."""
    return find_causes(runs("ppo"), Examples(*QUESTION), method="nearest")


@pytest.mark.parametrize(("lowest", "expected"), [(False, [3, 1]), (True, [0, 4])])
def test_records_are_ranked_by_their_score(lowest: bool, expected: list[int]) -> None:
    causes = pl.DataFrame({"record_id": range(6), "score": [-2.0, 1.0, 0.0, 3.0, -2.0, 0.5]})
    assert rank_records(causes, lowest=lowest, most=2)["record_id"].to_list() == expected


class TestCommand:
    QUESTION_OPTIONS = ("--prompt", QUESTION[0], "--response", QUESTION[1])

    def test_it_tells_what_taught_an_answer(self, runs, nearest):
        directory = runs("ppo")
        done = invoke("why", directory.path, *self.QUESTION_OPTIONS, "--top", 3)
        assert done.exit_code == 0, done.output
        text = " ".join(done.output.split())
        best = rank_records(nearest, lowest=False, most=3)
        assert "“5-1=5;5” after “5-1?”: its probability was" in text
        assert f"The strongest record is {best['record_id'][0]} in round {best['round'][0]}." in text
        assert "Sums of scores in rounds 1 to 3:" in text
        assert "The 3 records that speak for it most" in text
        assert "The 3 records that speak against it most" in text
        assert best["prompt"][0] in text
        assert "Note" not in text

    @pytest.mark.parametrize("by", [pytest.param("influence", marks=pytest.mark.long), "nearest", "bm25"])
    def test_as_json(self, runs, nearest, by):
        directory = runs("ppo")
        done = invoke("why", directory.path, *self.QUESTION_OPTIONS, "--top", 2, "--by", by, "--json")
        content = json.loads(done.stdout)
        causes = nearest if by == "nearest" else find_causes(directory, Examples(*QUESTION), method=by)
        assert [content[name] for name in ("prompts", "responses", "by")] == [[QUESTION[0]], [QUESTION[1]], by]
        for name, lowest in (("raised", False), ("lowered", True)):
            expected = rank_records(causes, lowest=lowest, most=2)
            assert [row["record"] for row in content[name]] == expected["record_id"].to_list()
            assert [row["score"] for row in content[name]] == pytest.approx(expected["score"].to_list())
        sums = [causes.filter(pl.col("score") > 0, round=number)["score"].sum() for number in (1, 2, 3)]
        assert content["sums"]["raised"] == pytest.approx(sums, rel=1e-5)
        if by == "bm25":
            assert content["log_prob"] is None
        else:
            assert content["log_prob_first"] == pytest.approx(causes["log_prob"][0])
            assert content["log_prob"] == pytest.approx(measure_trained(directory, Examples(*QUESTION)))
        assert content["notes"] == []

    def test_several_examples_and_flags(self, runs, tmp_path):
        directory = copy_run(runs("ppo"), tmp_path / "run")
        directory.sign()
        more = [option for pair in EXAMPLES[1:3] for option in ("--prompt", pair[0], "--response", pair[1])]
        done = invoke("why", directory.path, *self.QUESTION_OPTIONS, *more, "--top", 5, "--json")
        content = json.loads(done.stdout)
        assert content["prompts"] == [prompt for prompt, _ in EXAMPLES[:3]]
        assert content["decision"].startswith("One of 3 responses, by the geometric mean: its probability was")
        texts = tuple(zip(*EXAMPLES[:3], strict=True))
        best = rank_records(find_causes(directory, Examples(*texts), method="nearest"), lowest=False, most=5)
        assert [row["record"] for row in content["raised"]] == best["record_id"].to_list()
        assert content["log_prob"] == pytest.approx(measure_trained(directory, Examples(*texts)))
        bare = invoke("why", directory.path, "--flagged")
        assert "is flagged. Flag some on its page" in str(bare.exception)
        flagged = best["round", "record_id"].rows()[:2]
        for number, record in flagged:
            write_flag(directory.path, number, record, "")
        done = invoke("why", directory.path, "--flagged", "--by", "nearest", "--json")
        content = json.loads(done.stdout)
        assert content["decision"].startswith("One of the 2 flagged responses, by the geometric mean: its")
        assert content["notes"] == ["The flagged responses are asked about, so they are not listed."]
        assert content["raised"][0]["record"] not in dict(map(reversed, flagged))

    def test_missing_policies_are_named(self, runs, tmp_path):
        directory = copy_run(runs("ppo"), tmp_path / "run")
        directory.sign()
        (directory.path / "checkpoints" / "round_00001.safetensors").unlink()
        shutil.rmtree(directory.path / "model")
        done = invoke("why", directory.path, *self.QUESTION_OPTIONS)
        text = " ".join(done.output.split())
        assert "Note: The policies of 1 of 3 rounds were not kept, so their records are not scored." in text
        assert '"keep_checkpoints": 3' in text
        assert "“now” is the policy that drew the records of round 3" in text
        assert "Sums of scores in 2 of rounds 1 to 3:" in text
        assert "Note" not in invoke("why", directory.path, *self.QUESTION_OPTIONS, "--by", "bm25").output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompt", "5-1?"], "--prompt and --response go together"),
            ([*QUESTION_OPTIONS, "--record", 3], "--round and --record"),
            ([*QUESTION_OPTIONS, "--flagged"], "without --flagged"),
            (["--flagged", "--round", 3], "without --flagged"),
        ],
    )
    def test_what_is_refused_before_anything_is_read(self, tmp_path, arguments, message):
        assert_refused(message, "why", tmp_path / "nowhere", *arguments)
