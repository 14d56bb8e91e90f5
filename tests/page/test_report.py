import base64
import gzip
import json
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest

from helpers.compared_runs import HOSTILE, by_hand, run_of
from helpers.explored_runs import table_of
from helpers.pages import ASSETS
from whence.cli.terminal import describe_training
from whence.core import preserve_rng_state
from whence.lab import Comparison, compare, write_comparison
from whence.lab.agents import plan_comparison
from whence.lab.agents.training import run
from whence.lab.comparison import run_path
from whence.lab.tables import METRICS, cell, format_seeds, give_verdict, make_summary
from whence.page import ExploredRun, write_report
from whence.page.content.short_json import LONGEST
from whence.page.figures import (
    COLOURS,
    arm_colours,
    influence_distribution,
    kept_share,
    over_rounds,
    seconds_by_stage,
)
from whence.page.html import LISTED, embed
from whence.runs import RunDirectory

EXPLORER = ("Moments", "Where it harms and helps", "Which kinds of records harm", "All records")
"""Headings of the part of a page that opens rounds."""


def decode(text):
    """The content of an embedded round."""
    return json.loads(gzip.decompress(base64.b64decode(json.loads(text))))


TURNED = "\u202eشَجَرة \u2028</script>\u2029"  # right to left, and separators of lines
VOID = ("meta", "img", "link", "br", "input")


class Page(HTMLParser):
    """A page as a browser takes it apart: elements with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        elif not (self._open and self._open[-1] == "style"):
            self.texts.append((self._open[-1] if self._open else None, data.strip()))

    def of(self, tag):
        return [text for name, text in self.texts if name == tag and text]

    def tags(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self, name):
        """What is embedded as JSON under a name; None where there is no such element."""
        names = [attributes.get("id") for attributes in self.tags("script")]
        return json.loads(self.scripts[names.index(name)]) if name in names else None

    def rounds(self):
        """The embedded rounds by the ids of their elements."""
        ids = [attributes.get("id") for attributes in self.tags("script")]
        pairs = zip(ids, self.scripts, strict=True)
        return {id: decode(text) for id, text in pairs if id and re.fullmatch(r"round-\d+-\d+", id)}

    def facts(self):
        # Definitions and the run's last figures stand in lists of the same kind, before these.
        first = self.texts.index(("h2", "What was run"))
        texts = self.texts[first:]
        names, values = ([text for name, text in texts if name == tag] for tag in ("dt", "dd"))
        return dict(zip(names, values, strict=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Comparison:
    path = tmp_path_factory.mktemp("tiny")
    configs = plan_comparison(
        env="FrozenLake-v1",
        env_kwargs={"desc": ["SFF", "FFF", "FHG"], "is_slippery": True},
        hyperparameters={"n_steps": 64, "batch_size": 32, "n_epochs": 1},
        **{"arms": ["ppo", "iif", "random"], "seeds": 2, "rounds": 2, "eval_episodes": 4},
    )
    with preserve_rng_state():
        for config in configs:
            run(config, run_path(path, config))
    return compare(configs, path)  # nothing is left to run, so that no process starts


@pytest.fixture(scope="module")
def html(tiny) -> str:
    write_comparison(tiny, tiny.path / "report.html")
    return (tiny.path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def page_of(directory) -> Page:
    write_report(directory, directory.path.parent / "page.html")
    return Page((directory.path.parent / "page.html").read_text(encoding="utf-8"))


class TestPage:
    def test_nothing_is_loaded_from_elsewhere(self, html, page):
        loading = ("src", "srcset", "href", "data", "poster", "action", "background")
        for tag, attributes in page.elements:
            assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img")
            loads = [name for name in loading if not attributes.get(name, "#").startswith("#")]
            assert not loads, (tag, attributes)
        style = re.search(r"<style>(.*?)</style>", html, re.DOTALL).group(1)
        assert "url(" not in style
        assert "@import" not in style

    def test_the_browser_is_told_to_load_nothing(self, page):
        (policy,) = [tag["content"] for tag in page.tags("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
        assert policy.startswith("default-src 'none';")
        assert "http" not in policy
        assert "eval" not in policy

    def test_every_figure_has_a_place_of_its_own(self, page):
        places = [attributes["id"] for attributes in page.tags("div") if attributes.get("class") == "figure"]
        assert places == [f"figure-{number}" for number in range(7)]
        assert len(page.data("figures-data")) == 7
        assert page.of("h2") == [
            *("What stands out", "Summary", *EXPLORER, "Learning curves", "Records kept and dropped", "Policy entropy"),
            *("Approximate KL", "Time by stage", "Influence, iif", "Influence, random", "What was run"),
        ]

    def test_an_arm_has_one_colour_in_all_figures(self, page):
        curves, kept, entropy, kl, _, iif, random = page.data("figures-data")
        for figure in (curves, kept, entropy, kl):
            colours = {trace["name"]: trace["line"]["color"] for trace in figure["data"] if "name" in trace}
            assert colours == {"ppo": COLOURS[0], "iif": COLOURS[1], "random": COLOURS[2]}
        assert [figure["data"][-1]["line"]["color"] for figure in (iif, random)] == list(COLOURS[1:3])
        assert [attributes["style"] for attributes in page.tags("i")] == [f"background:{c}" for c in COLOURS[:3]]

    def test_the_table_holds_each_arm_and_metric(self, tiny, page):
        (summary,) = tiny.summary.values()
        assert page.of("th") == ["metric", "ppo (null)", "iif", "random", *METRICS.values(), "divergence (KL)"]
        rows = [[format_seeds(metric, entry[metric]) for entry in summary.values()] for metric in METRICS]
        assert page.of("td")[:-3] == [mean for row in rows for mean, _ in row]
        assert page.of("small")[:-3] == [seeds for row in rows for _, seeds in row if seeds]
        for mean, seeds, arm in zip(page.of("td")[-3:], page.of("small")[-3:], summary, strict=True):
            runs = [tiny.run(config).table("metrics") for config in tiny.configs if config.arm == arm]
            divergences = [float(run["train/approx_kl"].mean()) for run in runs]
            assert mean == f"{sum(divergences) / 2:.3g}"
            assert seeds == f"({divergences[0]:.3g}, {divergences[1]:.3g})"

    def test_it_says_what_was_run(self, page):
        assert page.of("bdi") == ["FrozenLake-v1: ppo, iif, random"]
        assert page.of("title") == ["FrozenLake-v1: ppo, iif, random · whence"]
        assert "2 seeds, 2 rounds, 4 evaluation episodes after each round." in page.of("p")
        facts = page.facts()
        assert facts["env"] == "FrozenLake-v1"
        assert json.loads(facts["desc"]) == ["SFF", "FFF", "FHG"]
        assert (facts["is_slippery"], facts["n_steps"], facts["batch_size"]) == ("true", "64", "32")
        assert (facts["rounds"], facts["drop"], facts["seeds"]) == ("2", "0.125", "0, 1")
        assert facts["arms"] == "ppo, iif, random"
        assert re.fullmatch(r"\d+\..*", facts["torch"])
        assert {"configuration", "env_kwargs", "hyperparameters", "versions"} <= set(page.of("h3"))
        assert not {"arm", "seed"} & facts.keys()

    def test_it_holds_the_records_of_one_seed_of_each_arm(self, tiny, page):
        data = page.data("page-data")
        assert (data["mode"], data["kind"]) == ("file", "steps")
        assert [run["label"] for run in data["runs"]] == ["ppo, seed 0", "iif, seed 0", "random, seed 0"]
        assert [run["rounds"] for run in data["runs"]] == [[1, 2]] * 3
        rounds = page.rounds()
        assert list(rounds) == [f"round-{run}-{number}" for run in range(3) for number in (1, 2)]
        shown = rounds["round-1-2"]
        error = pl.max_horizontal("error", pl.col("error").median())
        stored = (
            tiny.run(next(c for c in tiny.configs if c.arm == "iif"))
            .round("records", 2)
            .select("record_id", "score", surety=pl.col("score") / error)
        )
        by_record = {record: (score, surety) for record, score, surety in stored.iter_rows()}
        for end, surest in (("worst", stored["surety"].min()), ("best", stored["surety"].max())):
            score, surety = by_record[shown["round"][end][0]["record"]]  # one of several that are the same
            assert surety == pytest.approx(surest)
            assert shown["round"][end][0]["score"] == pytest.approx(score, rel=1e-3)
        listed = {str(moment["record"]) for end in ("worst", "best") for moment in shown["round"][end]}
        assert shown["details"].keys() == listed
        assert len(shown["round"]["strip"]["record_ids"]) == 64
        for record, detail in shown["details"].items():
            assert int(record) in detail["window"]["record_ids"]
            assert len(detail["window"]["values"]) == len(detail["window"]["record_ids"])

    def test_hostile_names_of_arms_stay_text_in_table_and_figures(self, tmp_path, monkeypatch):
        comparison = by_hand(tmp_path, arms=("ppo", "</script><b>"), scored=("</script><b>",))
        write_comparison(comparison, tmp_path / "report.html")
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert page.of("th")[:3] == ["metric", "ppo (null)", "</script><b>"]
        assert page.tags("b") == []
        assert "Influence, </script><b>" in page.of("h2")
        # Plotly would take tags for formatting.
        assert page.data("figures-data")[0]["data"][-1]["name"] == "&lt;/script&gt;&lt;b&gt;"


class TestRunPage:
    def test_a_finished_run(self, tiny, tmp_path):
        config = next(config for config in tiny.configs if (config.arm, config.seed) == ("iif", 1))
        run = tiny.run(config)
        write_report(ExploredRun(run, about=describe_training(run)), tmp_path / "deep" / "page.html")
        page = Page((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
        assert page.of("bdi") == ["FrozenLake-v1: iif"]
        assert "Seed 1, 2 of 2 rounds. iif: drop 12.5% of the records below 0." in page.of("p")
        assert page.of("h2") == [
            *("What stands out", *EXPLORER, "Learning curves", "Return of episodes", "Length of episodes"),
            *("Records kept and dropped", "Policy entropy", "Approximate KL", "Time by stage", "Influence, iif"),
            "What was run",
        ]
        assert page.of("dt")[0] == "steps"
        assert page.of("dd")[0] == "128"
        assert "No rounds yet" not in page.of("h2")
        assert page.facts()["arm"] == "iif"
        assert len(page.data("page-data")["runs"]) == 1
        # One seed has no spread.
        assert [len(figure["data"]) for figure in page.data("figures-data")[:4]] == [1] * 4

    def test_a_run_alone_has_the_colour_that_it_has_in_comparisons(self, tiny, tmp_path):
        assert tiny.configs[1].arm == "iif"
        write_report(tiny.run(tiny.configs[1]), tmp_path / "page.html")
        page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
        assert page.data("figures-data")[0]["data"][0]["line"]["color"] == COLOURS[1]

    def test_a_run_before_its_first_round(self, tmp_path):
        rule = {"rule": "IIF", "drop": 0.5, "warmup": 0, "unit": "record"}
        page = page_of(run_of(tmp_path / "lake", {"env": "Some-v0", "rule": rule}))
        assert page.of("h2") == ["No rounds yet", "What was run"]
        assert page.of("bdi") == ["Some-v0: IIF(drop=0.5, warmup=0)"]
        assert "0 rounds." in page.of("p")
        assert page.scripts == []

    def test_of_a_long_run_some_rounds_are_embedded_and_the_page_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr("whence.page.html.EMBEDDED_ROUNDS", 2)
        directory = run_of(tmp_path / "lake", {"env": "Some-v0"}, rounds=range(1, 4), n=10)
        html = (page_of(directory) and (tmp_path / "page.html")).read_text(encoding="utf-8")
        assert Page(html).data("page-data")["runs"][0]["rounds"] == [1, 3]
        assert "This file holds 2 of the 3 rounds. <code>whence view" in html
        assert f"whence report {directory.path} --rounds 1-2" in html
        found = [{"kind": "reward", "title": "", "evidence": "", "advice": "", "round": 2, "records": [], "total": 0}]
        monkeypatch.setattr("whence.page.content.explored_run.ExploredRun.list_findings", lambda run: found)
        assert page_of(directory).data("page-data")["runs"][0]["rounds"] == [1, 2, 3]  # with that of a finding
        monkeypatch.setattr("whence.page.html.EMBEDDED_ROUNDS", 200)
        write_report(directory, tmp_path / "page.html", rounds=[3])
        assert f"whence report {directory.path} --rounds 1-3" in (tmp_path / "page.html").read_text(encoding="utf-8")
        write_report(directory, tmp_path / "page.html", rounds=[1, 2, 3])
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert "This file holds" not in html
        assert (ASSETS / "vendor/tabulator/LICENSE").read_text() in unescape(html)

    @pytest.mark.parametrize("kind", ["language", "agent"])
    def test_several_runs_share_their_figures(self, tmp_path, whence, monkeypatch, kind):
        monkeypatch.setattr("whence.page.html.COMPARED_ROUNDS", 2)
        columns = {
            "language": {"reward": "Reward", "reward.right": "Reward: right", "length": "Length", "kl": "Divergence"},
            "agent": {"round_return": "Return of episodes", "round_length": "Length of episodes"},
        }[kind]
        for place, arm in enumerate("ab"):
            directory = RunDirectory.create(tmp_path / arm, {"kind": kind, "arm": arm})
            for number in (1, 2, 3):
                table = table_of(4, **({"prompt": ["p"] * 4, "response": ["r"] * 4} if kind == "language" else {}))
                directory.write_round("records", number, table)
                directory.append("metrics", {"round": number, **dict.fromkeys(columns, 10.0 * place + number)})
        paths = tmp_path / "a", tmp_path / "b"
        assert "Name its file: --out" in whence("report", *paths)[2]
        code, _, err = whence("report", *paths, "--out", tmp_path / "both.html")
        assert code == 0, err
        html = (tmp_path / "both.html").read_text(encoding="utf-8")
        page = Page(html)
        curves = [[(line["name"], line["y"]) for line in figure["data"]] for figure in page.data("figures-data")]
        assert curves == [[(str(paths[0]), [1.0, 2.0, 3.0]), (str(paths[1]), [11.0, 12.0, 13.0])]] * len(columns)
        titles = [title for title in page.of("h2") if title.startswith(tuple(columns.values()))]
        assert len(titles) == len(columns)
        assert [run["rounds"] for run in page.data("page-data")["runs"]] == [[1, 3], [1, 3]]
        assert "This file holds 4 of the 6 rounds" in html
        assert f"whence view {paths[0]} {paths[1]}" in html
        assert f"whence report {paths[0]} {paths[1]} --rounds 1-3 --out FILE" in html

    def test_a_file_of_many_rounds_has_two_megabytes_at_most(self, tmp_path):
        """Of rounds of 2,048 records, as PPO's defaults make them, whose numbers are noise; 0.9 MB are its own."""
        n, rng = 2_048, np.random.default_rng(0)
        noise = {name: rng.normal(size=n) for name in ("score", "advantage", "value", "return", "log_prob")}
        noise |= {"error": rng.uniform(0.5, 1, n), "observation": rng.normal(size=(n, 4))}
        noise |= {"episode_id": np.arange(n) // 500, "step": np.arange(n) % 500}
        directory = RunDirectory.create(tmp_path / "cart", {"env": "Some-v0"})
        for number in range(1, 31):
            directory.write_round("records", number, table_of(n, **noise))
            directory.append("metrics", {"round": number, "episode_return": 1.0 * number})
        page = page_of(directory)
        assert (tmp_path / "page.html").stat().st_size < 2_000_000
        held = sum(len(text) for text in page.scripts if text.startswith('"H4sI') and len(text) < 100_000)
        assert 100_000 < held < (tmp_path / "page.html").stat().st_size < held + 1_000_000
        rounds = page.rounds()
        assert len(rounds) in (24, 25)  # with one of a finding
        content = rounds["round-0-30"]
        strip, records = content["round"]["strip"], directory.round("records", 30)
        ids, scores = np.cumsum(strip["record_ids"]), np.array(strip["scores"])
        stored = records.select(pl.col("score").gather(pl.Series(records["record_id"].search_sorted(ids)))).to_series()
        assert np.abs(scores - stored.to_numpy()).max() < 0.01
        faces = [int(record) for record in content["details"]]
        assert 2 * LISTED <= len(faces) <= 2 * LISTED + 1  # the records repeat, of which a finding may name one
        for face in faces:
            shown = content["details"][str(face)]["window"]
            step = records.row(by_predicate=pl.col("record_id") == face, named=True)["step"]
            last = min(499, n - 1 - (face - step))
            assert shown["steps"] == [at for at in range(last + 1) if abs(at - step) <= 24]  # of its episode
            near = records.filter(pl.col("record_id").is_in(shown["record_ids"])).sort("step")["advantage"].to_list()
            assert shown["advantages"] == pytest.approx(near, rel=1e-3)

    @pytest.mark.parametrize(
        ("target", "words"),
        [
            (None, "target, here the return:"),
            ({"target": "TokenReturn"}, "target, here the expected reward, token by token:"),
            ({"target": "mine.M"}, "target:"),
        ],
    )
    def test_it_says_what_scores_are_of(self, tmp_path, target, words):
        directory = run_of(tmp_path / "lake", {"target": target}, rounds=(1,))
        write_report(directory, tmp_path / "page.html")
        assert f"training on it raises the {words}" in (tmp_path / "page.html").read_text(encoding="utf-8")

    def test_what_was_run_is_shown_in_words(self, tmp_path):
        rule = {
            "rule": "RandomDrop",
            "seed": 0,
            "like": {"rule": "FromMask", "ids": {"digest": "1a"}, "unit": "episode"},
        }
        schedules = {"learning_rate": {"schedule": "linear", "start": 0.1, "end": 0.0, "end_fraction": 1.0}}
        schedules |= {"clip_range": {"schedule": "function", "code": "0f"}, "max_grad_norm": "inf"}
        wrappers = [{"class": "VecFrameStack", "n_stack": 4}, {"class": "VecTransposeImage"}]
        parts = {"env_wrappers": [{"class": "mine:Walk", "kwargs": {}}, {"class": "mine:Wrap", "kwargs": {"n": 2}}]}
        config = {"rule": rule, "objective": None, "hyperparameters": schedules, "vec_wrappers": wrappers, **parts}
        assert page_of(run_of(tmp_path / "lake", config)).facts() == {
            "rule": "RandomDrop(seed=0, like=FromMask(ids=<digest 1a>, unit='episode'))",
            "objective": "the model's",
            "learning_rate": "a schedule: linear(start=0.1, end=0.0, end_fraction=1.0)",
            "clip_range": "a schedule of the code 0f",
            "max_grad_norm": "inf",
            "vec_wrappers": '["VecFrameStack(4)", "VecTransposeImage"]',
            "env_wrappers": "Walk < Wrap",
        }

    def test_without_evaluations_the_training_episodes_make_the_curve(self, tmp_path):
        directory = RunDirectory.create(tmp_path / "lake", {"env": "Some-v0"})
        for number, value in enumerate((None, 1.0, 3.0), start=1):
            directory.append("metrics", {"round": number, "episode_return": value})
        page = page_of(directory)
        (figure,) = page.data("figures-data")
        assert (figure["data"][0]["x"], figure["data"][0]["y"]) == ([2, 3], [1.0, 3.0])
        assert figure["layout"]["yaxis"]["title"]["text"] == "mean return of training episodes"
        assert dict(zip(page.of("dt"), page.of("dd"), strict=True))["return, last 100 episodes"] == "3"

    def test_a_run_that_diverged(self, tmp_path):
        directory = run_of(tmp_path / "lake", {"env": "Some-v0"})
        for number, value in enumerate((0.1, float("nan"), float("inf")), start=1):
            directory.append("metrics", {"round": number, "train/approx_kl": value, "train/entropy_loss": -value})
        page = page_of(directory)
        assert page.data("figures-data")[1]["data"][0]["y"] == [0.1, None, None]
        assert dict(zip(page.of("dt"), page.of("dd"), strict=True))["policy entropy"] == "inf nats"

    @pytest.mark.parametrize("text", [HOSTILE, TURNED, "x" * 100_000, "{{ 7 * 7 }}", "`</code><b>`"])
    def test_hostile_text_stays_text(self, tmp_path, text):
        config = {"env": text, "rule": text, "optimizer": text, "hyperparameters": {text: [text]}}
        observations = {"observation": None, f"observation.{text}": np.arange(60)}
        directory = run_of(tmp_path / "lake", config, (1,), reason=text, **observations)
        page = page_of(directory)
        assert page.of("bdi") == [f"{text}: {text}".strip()]
        assert page.facts()["env"] == text.strip()
        assert "img" not in {tag for tag, _ in page.elements}
        assert len(page.tags("b")) == 3  # the template's own: record, influence, moment
        rows = page.rounds()["round-0-1"]["round"]["rows"]
        reason = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        assert {row["reason"] for row in rows} == {None, reason}
        assert all(row["observation"].startswith(text[:100]) for row in rows)


class TestEmbedded:
    @pytest.mark.parametrize("text", [HOSTILE, TURNED, "<!--<script>", "]]>", "\ud800", "\\u003c"])
    def test_json_holds_nothing_that_means_something_to_html(self, text):
        out = str(embed([{text: text}]))
        assert not re.search("[<>&\u2028\u2029]", out)
        assert out.isascii()
        assert json.loads(out) == [{text: text}]


class TestCell:
    @pytest.mark.parametrize(
        ("metric", "mean", "low", "high", "expected"),
        [
            ("se_ave", 0.3367, -0.1, 0.5, ("33.7%", "[-10.0%, 50.0%]")),
            ("rt_peak_paper", -0.25, None, None, ("-25.0%", "")),
            ("se_peak", None, None, None, ("–", "")),
            ("final_return", 0.3367, 0.25, 123.456, ("0.337", "[0.25, 123]")),
            ("auc", -319.2, -320.0, 0.0, ("-319", "[-320, 0]")),
        ],
    )
    def test_shares_are_percentages_and_returns_are_not(self, metric, mean, low, high, expected):
        assert cell(metric, {"mean": mean, "low": low, "high": high}) == expected


PPO_RETURNS = {0: 100.0, 1: 110.0, 2: 90.0, 3: 105.0, 4: 95.0}


class TestVerdict:
    def verdict(self, *differences):
        returns = {seed: PPO_RETURNS[seed] + difference for seed, difference in enumerate(differences)}
        return give_verdict("iif", returns, PPO_RETURNS)

    def test_an_interval_with_zero_is_no_evidence(self):
        # Mean 12, standard deviation 37.2, of the mean 16.6; t(4) at 97.5% is 2.776.
        text = "No evidence that iif ends higher than ppo (difference 12 [-34.2, 58.2], 5 seeds)."
        assert self.verdict(12, -40, 60, 30, -2) == text

    @pytest.mark.parametrize(("sign", "word", "ends"), [(1, "higher", "9.41, 14.2"), (-1, "lower", "-14.2, -9.41")])
    def test_evidence_in_either_direction(self, sign, word, ends):
        verdict = self.verdict(*(sign * difference for difference in (12, 14, 9, 13, 11)))
        assert verdict == f"iif ends {word} than ppo (difference {sign * 11.8} [{ends}], 5 seeds)."

    @pytest.mark.parametrize(
        ("returns", "text"),
        [
            ({0: 1.0, 1: 2.5}, "iif ends at 1, 2.5 and ppo at 100, 110"),
            ({2: 1.0, 9: 7.0}, "iif ends at 1 and ppo at 90"),
            ({9: 7.0}, "they share none"),
        ],
    )
    def test_fewer_than_three_seeds_make_no_verdict(self, returns, text):
        verdict = give_verdict("iif", returns, PPO_RETURNS)
        assert verdict == f"Too few seeds to compare iif with ppo: {text}."

    def test_a_comparison_has_a_verdict_for_each_arm(self, tmp_path):
        # Run by run, final returns rise by one: iif's are 1 above ppo's, random's 2.
        comparison = by_hand(tmp_path, arms=("ppo", "iif", "random"), seeds=(0, 1, 2))
        summary = make_summary(comparison)
        saved = summary.rows[0][1]
        assert summary.rows[0][0] == "SE_ave"
        assert summary.verdicts == [
            sentence
            for place, (arm, by) in enumerate((("iif", 1), ("random", 2)), 1)
            for sentence in (
                f"{arm} saves {' '.join(saved[place])} of the rounds that ppo takes (SE_ave); other seeds of ppo: "
                f"{' '.join(saved[0])}.",
                f"{arm} ends higher than ppo (difference {by} [{by}, {by}], 3 seeds).",
            )
        ]
        assert summary.headings == ["ppo (null)", "iif", "random"]
        assert summary.rows[-1] == ("divergence (KL)", [("0.01", "[0.01, 0.01]")] * 3)
        write_comparison(comparison, tmp_path / "report.html")
        items = Page((tmp_path / "report.html").read_text(encoding="utf-8")).of("li")
        assert items[:4] == summary.verdicts

    def test_two_seeds_are_shown_themselves(self):
        entry = {"mean": 0.25, "low": -9.0, "high": 9.0, "per_seed": [0.0, 0.5]}
        assert format_seeds("final_return", entry) == ("0.25", "(0, 0.5)")
        assert format_seeds("se_ave", {**entry, "per_seed": [None, 0.5]}) == ("25.0%", "(–, 50.0%)")
        assert format_seeds("final_return", {**entry, "per_seed": [0, 0, 0.5]}) == ("0.25", "[-9, 9]")
        assert format_seeds("final_return", {**entry, "low": None, "per_seed": [0.25]}) == ("0.25", "")


TWO_COLOURS = arm_colours(["ppo", "iif"], "ppo")


class TestFigures:
    @pytest.fixture
    def tables(self, tmp_path):
        return by_hand(tmp_path, scored=("ppo", "iif")).table

    def test_learning_curves(self, tables):
        # ppo: seeds 0 and 1 reach 0, 1, 2 and 0, 3, 4; iif: 0, 2, 3 and 0, 4, 5.
        figure = over_rounds(tables("evaluations"), "test_return", "mean test return", TWO_COLOURS)
        low, high, mean = figure.data[:3]
        assert [list(trace.x) for trace in figure.data] == [[0, 1, 2]] * 6
        assert (list(low.y), list(high.y), list(mean.y)) == ([0, 1, 2], [0, 3, 4], [0, 2, 3])
        assert [(trace.name, trace.line.color) for trace in figure.data[2::3]] == [
            ("ppo", COLOURS[0]),
            ("iif", COLOURS[1]),
        ]
        assert list(figure.data[5].y) == [0, 3, 4]
        assert [trace.fill for trace in figure.data[:3]] == [None, "tonexty", None]

    def test_kept_share(self, tables):
        figure = kept_share(tables("metrics"), TWO_COLOURS)
        ppo, iif = figure.data[2], figure.data[5]
        assert list(ppo.y) == pytest.approx([0.9, 0.9])  # seeds 0 and 1: 0 and 0.2 dropped
        assert list(iif.y) == pytest.approx([0.8, 0.8])  # 0.1 and 0.3
        assert figure.layout.yaxis.range[0] == 0

    def test_influence_is_that_of_one_arm(self, tables):
        figure = influence_distribution(tables("metrics"), "iif", TWO_COLOURS)
        # Runs 1 and 3 of four are iif's: quantiles 1 and 3 above their levels.
        assert [list(trace.y) for trace in figure.data] == [[level + 2] * 2 for level in (5, 95, 25, 75, 50)]
        assert [trace.name for trace in figure.data if trace.name] == ["5 to 95%", "25 to 75%", "median"]
        assert figure.data[-1].line.color == COLOURS[1]

    def test_seconds_by_stage(self, tables):
        figure = seconds_by_stage(tables("timings"))
        assert {trace.name: list(zip(trace.y, trace.x, strict=True)) for trace in figure.data} == {
            "collection": [("ppo", 1.0), ("iif", 1.0)],
            "scoring": [("ppo", 2.0), ("iif", 4.0)],  # 0 and 4; 2 and 6
            "optimisation": [("ppo", 3.0), ("iif", 3.0)],
        }
        assert figure.layout.barmode == "stack"
