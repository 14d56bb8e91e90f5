"""Why a response scored as it did: a round built again, its tokens, and the rows of the target that it pulls at."""

import json
import shutil

import polars as pl
import pytest

from helpers.language_runs import NAMES, copy_run, invoke
from whence.cli.terminal.moment_tables import colour_tokens
from whence.core import RunDirectoryError, WhenceError
from whence.runs import RunDirectory
from whence.stored.language.rounds import explain_response

pytestmark = pytest.mark.usefixtures("laboratory_cache")


@pytest.mark.parametrize("name", NAMES)
def test_a_round_built_again_scores_as_it_did(runs, name):
    directory = runs(name)
    for number in (1, 3):
        table = directory.round("records", number)
        largest = float(table["score"].abs().max())
        assert largest > 0
        for row in table.sort(pl.col("score").abs(), descending=True).head(2).iter_rows(named=True):
            computed = explain_response(directory, number, row["record_id"])
            assert computed.note is None
            assert len(computed.tokens) == len(computed.parts) == len(row["response_ids"])
            assert sum(computed.parts) == pytest.approx(row["score"], abs=1e-3 * largest)
            pulls = computed.pulls
            assert pulls["part"].sum() == pytest.approx(row["score"], abs=1e-3 * largest)
            assert pulls["part"].is_sorted(descending=True)
            if directory.config["experiment"]["arm"] == "ippo":
                assert len(pulls) == pulls["record"].null_count() == 16
                assert pulls["prompt"].str.ends_with("?").all()
                assert pulls["response"].str.contains(";").all()
            else:
                others = table.filter(pl.col("record_id") != row["record_id"])  # no response votes for itself
                expected = others.select("record_id", "response").rows()
                assert pulls.sort("record").select("record", "response").rows() == expected


def test_a_round_that_is_built_again_otherwise_says_so(runs, tmp_path):
    bare = copy_run(runs("ppo"), tmp_path / "bare")
    table = bare.round("records", 2)
    bare.write_round("records", 2, table.with_columns(pl.col("score") * 3))
    worst = int(table.sort("score")["record_id"][0])
    note = explain_response(bare, 2, worst).note
    assert note.startswith("Computed again, the score is ")
    bare.config["select"] = "in_step"
    assert explain_response(bare, 2, worst).note.startswith("Before the round's steps the score is ")


class TestRefusals:
    def test_a_policy_that_was_not_kept(self, runs, tmp_path):
        for name, file, how in (
            ("ppo", "checkpoints/round_00001.safetensors", '{"save_every": 1, "keep_checkpoints": 3}'),
            ("grpo", "trl/checkpoint-2", '{"save_strategy": "steps", "save_steps": 1}'),
        ):
            bare = copy_run(runs(name), tmp_path / name)
            path = bare.path / file
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            with pytest.raises(RunDirectoryError) as refusal:
                explain_response(bare, 2, int(bare.round("records", 2)["record_id"][0]))
            assert f"{path} is not there" in str(refusal.value)
            assert how in str(refusal.value)
            assert len(explain_response(bare, 1, 0).pulls)  # the start model needs no checkpoint

    def test_rows_that_are_not_there(self, runs):
        with pytest.raises(RunDirectoryError, match="has no record 999"):
            explain_response(runs("ppo"), 1, 999)


class TestCommand:
    def test_it_shows_tokens_and_what_they_pull_at(self, runs):
        directory = runs("ppo")
        worst = directory.round("records", 3).sort("score").row(0, named=True)
        done = invoke("why", directory.path, "--top", 2)
        assert done.exit_code == 0, done.output
        assert f"Record {worst['record_id']}, round 3" in done.output
        assert worst["prompt"] in done.output
        assert "demonstration" in done.output
        assert "What it pulls against" in done.output
        again = invoke("why", directory.path, "--record", worst["record_id"], "--json", "--top", 2)
        found = json.loads(again.stdout)
        assert found["record_id"] == worst["record_id"]
        assert sum(token["part"] for token in found["tokens"]) == pytest.approx(worst["score"], rel=1e-3)
        assert all(pull["part"] < 0 for pull in found["pulls"]["against"])
        assert len(found["pulls"]["against"]) <= 2

    def test_text_of_a_model_steers_no_terminal(self, runs, tmp_path):
        directory = copy_run(runs("grpo"), tmp_path / "run")
        directory.sign()
        table = directory.round("records", 3)
        hostile = "[red]\x1b[2J\u202e</script>\n"
        table = table.with_columns(prompt=pl.lit(hostile), response=pl.lit(hostile))
        directory.write_round("records", 3, table)
        done = invoke("why", directory.path, "--record", int(table["record_id"][0]))
        assert done.exit_code == 0, done.output
        assert "\x1b[2J" not in done.output
        assert "\u202e" not in done.output
        assert "[red]" in done.output
        assert "\\n" in done.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--round", 9], "round_00009.parquet is not there"),
            (["--record", 99999], "No round of"),
        ],
    )
    def test_what_is_refused(self, runs, arguments, message):
        done = invoke("why", runs("ppo").path, *arguments)
        assert isinstance(done.exception, WhenceError)
        assert message in str(done.exception)

    @pytest.mark.parametrize("option", [("--round", 1), ("--prompt", "a", "--response", "b")])
    def test_an_agents_run_is_refused(self, tmp_path, option):
        RunDirectory.create(tmp_path, {"rule": "IIF()"}).write_round("records", 1, pl.DataFrame({"record_id": [0]}))
        done = invoke("why", tmp_path, *option)
        assert f"is a run of an agent, and {option[0]} is for language models" in str(done.exception)

    @pytest.mark.parametrize(
        "option", [("--episode-seed", 0), ("--step", 0), ("--observation", "[]"), ("--env", "E-v1")]
    )
    def test_what_is_for_agents_is_refused(self, runs, option):
        done = invoke("why", runs("ppo").path, *option)
        assert f"is a run of a language model, and {option[0]} is for agents" in str(done.exception)

    def test_colours_follow_sign_and_size(self):
        text = colour_tokens(["a", "bb", "c", "d"], [-1.0, 0.2, 0.0, 0.9])
        assert text.plain == "abbcd"
        spans = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
        assert spans == {"a": "black on #ff8a3d", "bb": "#5f9bff", "d": "black on #5f9bff"}
