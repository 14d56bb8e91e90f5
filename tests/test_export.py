"""Records for other programs: Parquet, JSON lines, Rerun; notebooks; the host's logger."""

import importlib.util
import json
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Image, KVWriter, Logger

from whence import IIF, Influence, RecordBatch, RunDirectory, Unsupported, WhenceError
from whence.experiments import configure, run
from whence.influence import Provenance
from whence.notebook import Bar, Histogram, format_table
from whence.report.exports import export_rerun, export_table
from whence.sb3 import InfluenceCallback
from whence.sb3.moment_log import draw_scores, format_moments


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    path = tmp_path_factory.mktemp("cart") / "run"
    hyperparameters = {"n_steps": 128, "n_epochs": 1, "batch_size": 64}
    run(configure(env="CartPole-v1", arm="iif", rounds=3, eval_episodes=0, hyperparameters=hyperparameters), path)
    return RunDirectory.open(path)


def make_run(path, rounds):
    directory = RunDirectory.create(path, {"env": "Nobody-v0"})
    for number, columns in rounds.items():
        directory.write_round("records", number, pl.DataFrame(columns))
    return directory


class TestTables:
    def test_every_record_of_every_round(self, cart, tmp_path):
        exported = export_table(cart, tmp_path / "all.parquet", "parquet")
        table = pl.read_parquet(tmp_path / "all.parquet")
        assert (exported.records, exported.rounds, exported.notes) == (384, (1, 2, 3), ())
        assert table.columns[:2] == ["round", "record_id"]
        assert {"score", "error", "keep", "reason", "action", "observation"} <= set(table.columns)
        for number in (1, 2, 3):
            assert table.filter(pl.col("round") == number).drop("round").equals(cart.round("records", number))

    def test_lines_of_json_say_the_same(self, cart, tmp_path):
        export_table(cart, tmp_path / "all.jsonl", "jsonl", rounds=[3, 2])
        rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert [row["round"] for row in rows] == [3] * 128 + [2] * 128
        stored = cart.round("records", 3)
        assert [row["record_id"] for row in rows[:128]] == stored["record_id"].to_list()
        assert [row["score"] for row in rows[:128]] == pytest.approx(stored["score"].to_list(), rel=1e-5)

    @pytest.mark.parametrize("kind", ["parquet", "jsonl"])
    def test_columns_that_a_round_lacks_are_null_there(self, tmp_path, kind):
        rounds = {1: {"record_id": [0], "action": [1]}, 2: {"record_id": [1], "score": [float("nan")]}}
        export_table(make_run(tmp_path / "run", rounds), tmp_path / "out", kind)
        if kind == "parquet":
            rows = pl.read_parquet(tmp_path / "out").fill_nan(None).to_dicts()
        else:
            rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        assert rows == [
            {"round": 1, "record_id": 0, "action": 1, "score": None},
            {"round": 2, "record_id": 1, "action": None, "score": None},
        ]

    def test_a_broken_round_is_left_out_with_a_note(self, tmp_path):
        directory = make_run(tmp_path / "run", {1: {"record_id": [0]}, 2: {"record_id": [1]}})
        directory.round_path("records", 1).write_bytes(b"half a file")
        exported = export_table(directory, tmp_path / "out.parquet", "parquet")
        assert exported.rounds == (2,)
        assert "Round 1 is left out" in exported.notes[0]
        directory.round_path("records", 2).write_bytes(b"")
        with pytest.raises(WhenceError, match="nothing to export"):
            export_table(directory, tmp_path / "none.parquet", "parquet")
        assert not (tmp_path / "none.parquet").exists()

    def test_a_round_that_is_not_there(self, cart, tmp_path):
        with pytest.raises(WhenceError, match=r"Round 7 is not in .* rounds 1 to 3"):
            export_table(cart, tmp_path / "out", "parquet", rounds=[7])


class TestRerun:
    def test_scalars_frames_and_text_on_both_time_lines(self, cart, tmp_path):
        rerun = pytest.importorskip("rerun")
        path = tmp_path / "cart.rrd"
        exported = export_rerun(cart, path, rounds=[2])
        assert (exported.records, exported.notes) == (128, ())
        assert path.read_bytes()[:3] == b"RRF"
        printed = subprocess.run(
            [sys.executable, "-m", "rerun", "rrd", "print", "-vv", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in ("records/score", "records/error", "records/reward", "metrics/mean", "moments/harmful/1/text"):
            assert f"/{name}" in printed, name
        assert "/moments/helpful/1/frame" in printed
        assert "step" in printed
        assert "round" in printed
        assert rerun.get_global_data_recording() is None

    def test_what_cannot_be_drawn_is_said_and_the_rest_is_there(self, tmp_path):
        pytest.importorskip("rerun")
        columns = {"record_id": [0, 1], "episode_id": [0, 0], "step": [0, 1], "env_index": [0, 0], "score": [-1.0, 2.0]}
        exported = export_rerun(make_run(tmp_path / "run", {1: columns}), tmp_path / "out.rrd")
        assert len(exported.notes) == 1
        assert "Some frames are missing" in exported.notes[0]
        assert (tmp_path / "out.rrd").stat().st_size > 0

    def test_without_the_package_the_extra_is_named(self, cart, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "rerun", None)
        with pytest.raises(Unsupported, match=r"pip install '\.\[rerun\]'"):
            export_rerun(cart, tmp_path / "out.rrd")


class TestCommand:
    def test_parquet_and_json(self, cart, whence, tmp_path):
        code, out, _ = whence(
            "export", cart.path, "--to", "parquet", "--out", tmp_path / "a.parquet", "--rounds", "1-2"
        )
        assert code == 0
        assert "256 records of 2 rounds" in out
        code, out, _ = whence("export", cart.path, "--to", "jsonl", "--out", tmp_path / "a.jsonl", "--json")
        assert json.loads(out)["rounds"] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--to", "csv", "--out", "a.csv"], "--to is 'csv'"),
            (["--to", "parquet", "--out", "."], "which is a directory"),
            (["--to", "parquet", "--out", "a", "--rounds", "x"], "--rounds is 'x'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, cart, whence, arguments, said):
        code, _, err = whence("export", cart.path, *arguments)
        assert code == 2
        assert said in err


class Tags(HTMLParser):
    """It checks that tags are closed in order, and keeps names and text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.names, self.text = [], set(), ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.names.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


class TestNotebooks:
    def test_influence_shows_both_ends_with_errors(self):
        scores = torch.arange(-10.0, 10.0)
        about = Provenance("<script>alert(1)</script>", "o", "ghost", "why", ())
        page = Tags(Influence(scores, torch.arange(20), about, errors=torch.full((20,), 0.5))._repr_html_())
        assert page.names == {"div", "table", "thead", "tbody", "tr", "th", "td"}
        assert "<script>alert(1)</script>" in page.text
        assert "-10 ± 0.5" in page.text
        assert "9 ± 0.5" in page.text
        assert "-3 ± 0.5" not in page.text

    def test_few_scores_and_none_above_zero(self):
        about = Provenance("t", "o", "ghost", "why", ())
        assert "0 ± " not in Tags(Influence(torch.zeros(3), torch.arange(3), about)._repr_html_()).text

    def test_records_show_their_columns(self):
        records = RecordBatch(
            observations={"<b>": torch.zeros(4, 2), "y": torch.ones(4)},
            actions=torch.tensor([0, 1, 1, 1]),
            log_probs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
            advantages=torch.zeros(4),
            record_ids=[10_240, 10_241, 10_242, 10_243],
        )
        page = Tags(records._repr_html_())
        assert "b" not in page.names
        for text in ("RecordBatch of 4 records", "observations.<b>", "4 × 2", "-2.5", "10240"):
            assert text in page.text, text

    def test_bars_point_to_their_sides(self):
        page = format_table("t", ("a", "b"), [[Bar(-0.5), Bar(1.0)], [Histogram([0, 2]), None]])
        assert "left:25.0%;width:25.0%" in page
        assert "left:50.0%;width:50.0%" in page
        assert Tags(page)


class Fake(KVWriter):
    """It stands for TensorBoard's output: it gets what is not excluded for it."""

    def __init__(self, name):
        self.name, self.values = name, {}

    def write(self, key_values, key_excluded, step=0):
        self.values |= {
            name: value for name, value in key_values.items() if self.name not in (key_excluded[name] or ())
        }

    def close(self):
        pass


def learn(**settings):
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=128, batch_size=64, n_epochs=1, seed=0, device="cpu")
    formats = [Fake(name) for name in ("tensorboard", "stdout", "log", "json", "csv")]
    model.set_logger(Logger(folder=None, output_formats=formats))
    model.learn(256, callback=InfluenceCallback(IIF(), **settings))
    return model, formats


class TestLoggedImages:
    def test_off_by_default(self):
        assert not {"influence/moments", "influence/scores"} & learn()[1][0].values.keys()

    def test_tensorboard_gets_a_picture_and_a_table_and_text_formats_do_not(self):
        plain, _ = learn()
        model, (tensorboard, *others) = learn(log_images=True)
        picture = tensorboard.values["influence/scores"]
        assert isinstance(picture, Image)
        assert picture.dataformats == "HWC"
        assert picture.image.shape == (360, 640, 3)
        assert "| record | episode | steps |" in tensorboard.values["influence/moments"]
        for other in others:
            assert not {"influence/moments", "influence/scores"} & other.values.keys()
            assert "influence/mean" in other.values
        for one, same in zip(model.policy.parameters(), plain.policy.parameters(), strict=True):
            assert torch.equal(one, same)

    def test_equal_scores_have_a_picture_too(self):
        table = pl.DataFrame({"record_id": [0, 1], "score": [0.0, 0.0], "keep": [True, False]})
        assert draw_scores(table, 1).dtype == np.uint8
        assert format_moments(table, 1) == "Round 1: no record scores below 0."

    def test_without_matplotlib_it_is_refused_at_once(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match="draws with Matplotlib"):
            InfluenceCallback(IIF(), log_images=True)
