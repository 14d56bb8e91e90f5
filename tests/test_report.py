import json
import re
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest

from whence.experiments import Comparison, Curve, RunConfig, compare, plan, summarise
from whence.experiments.compare import run_path
from whence.experiments.training import run
from whence.guards import kept_generators
from whence.report import write_report
from whence.report.figures import COLOURS, dropped_share, influence_distribution, learning_curves, seconds_by_stage
from whence.report.page import METRICS, READING, cell
from whence.runs import RunDirectory

HOSTILE = "<script>alert(1)</script>\"'&</title><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """A page as a browser takes it apart: elements with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "link", "br"):
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Comparison:
    path = tmp_path_factory.mktemp("tiny")
    configs = plan(
        env="FrozenLake-v1",
        env_kwargs={"desc": ["SFF", "FFF", "FHG"], "is_slippery": True},
        hyperparameters={"n_steps": 64, "batch_size": 32, "n_epochs": 1},
        **{"arms": ["ppo", "iif", "random"], "seeds": 2, "rounds": 2, "eval_episodes": 20},
    )
    with kept_generators():
        for config in configs:
            run(config, run_path(path, config))
    return compare(configs, path)  # nothing is left to run, so that no process starts


@pytest.fixture(scope="module")
def html(tiny) -> str:
    write_report(tiny, tiny.path / "report.html")
    return (tiny.path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def by_hand(path, *, env="Some-v0", arms=("ppo", "iif"), env_kwargs=None, scored=("iif",)) -> Comparison:
    """A comparison of two rounds whose numbers are known, without any training."""
    configs = [
        RunConfig(env=env, arm=arm, seed=seed, rounds=2, env_kwargs=env_kwargs or {}) for seed in (0, 1) for arm in arms
    ]
    curves = {}
    for number, config in enumerate(configs):
        directory = RunDirectory.create(run_path(path, config), config.to_json(), versions={"torch": HOSTILE})
        returns = [0.0, 1.0 + number, 2.0 + number]
        for k, value in enumerate(returns):
            directory.append("evaluations", {"round": k, "test_return": value, "standard_error": 0.1, "episodes": 2})
        for k in (1, 2):
            row = {"round": k, "dropped_share": 0.1 * number}
            if config.arm in scored:
                row |= {f"q{level:02d}": level * 1.0 + number for level in (0, 5, 25, 50, 75, 95, 100)}
            directory.append("metrics", row)
            stages = {"collection_cpu": 1.0, "scoring_cpu": 2.0 * number, "optimisation_cpu": 3.0}
            directory.append("timings", {"round": k, **stages})
        curves.setdefault(config.arm, {})[config.seed] = Curve(np.array(returns), np.full(3, 0.1), np.ones(2))
    return Comparison(path, configs, {env: summarise(curves)})


class TestPage:
    def test_it_is_one_file(self, tiny, html, tmp_path):
        write_report(tiny, tmp_path / "deep" / "report.html")
        assert [file.name for file in (tmp_path / "deep").iterdir()] == ["report.html"]
        assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert html.rstrip().endswith("</html>")

    def test_nothing_is_loaded_from_elsewhere(self, html, page):
        loading = ("src", "srcset", "href", "data", "poster", "action", "background")
        for tag, attributes in page.elements:
            assert tag not in ("link", "iframe", "object", "embed", "base", "form")
            assert not [name for name in loading if attributes.get(name)], (tag, attributes)
        style = re.search(r"<style>(.*?)</style>", html, re.DOTALL).group(1)
        assert "url(" not in style
        assert "@import" not in style

    def test_the_plotting_library_is_there_exactly_once(self, page):
        assert len([script for script in page.scripts if len(script) > 500_000]) == 1
        assert sum("plotly.js v" in script for script in page.scripts) == 1
        drawing = [script for script in page.scripts if "Plotly.newPlot" in script and len(script) < 500_000]
        # Learning curves, records dropped, time by stage, and the influence of the two arms that score.
        assert len(drawing) == 5
        library = next(at for at, script in enumerate(page.scripts) if len(script) > 500_000)
        assert all(page.scripts.index(script) > library for script in drawing)

    def test_every_figure_has_a_place_of_its_own(self, page):
        places = [
            attributes["id"] for attributes in page.tags("div") if "plotly-graph-div" in attributes.get("class", "")
        ]
        assert len(places) == len(set(places)) == 5
        assert page.of("h2") == [
            *("What it came to", "Learning curves", "Records dropped", "Time by stage"),
            *("Influence, iif", "Influence, random", "What was run"),
        ]

    def test_the_table_holds_each_arm_and_metric(self, tiny, page):
        (summary,) = tiny.summary.values()
        assert page.of("th") == ["metric", "ppo (null)", "iif", "random"]
        rows = [
            [heading, *(cell(metric, entry[metric])[0] for entry in summary.values())]
            for metric, heading in METRICS.items()
        ]
        assert page.of("td") == [text for row in rows for text in row]
        ranges = [cell(metric, entry[metric])[1] for metric in METRICS for entry in summary.values()]
        assert page.of("small") == [text for text in ranges if text]
        assert READING in page.of("p")

    def test_it_says_what_was_run(self, page):
        assert page.of("h1") == ["FrozenLake-v1: ppo, iif, random"]
        assert page.of("title") == ["FrozenLake-v1: ppo, iif, random · whence"]
        assert "2 seeds, 2 rounds, 20 evaluation episodes after each round." in page.of("p")
        facts = dict(zip(page.of("dt"), page.of("dd"), strict=True))
        assert facts["env"] == "FrozenLake-v1"
        assert json.loads(facts["env_kwargs"]) == {"desc": ["SFF", "FFF", "FHG"], "is_slippery": True}
        assert json.loads(facts["hyperparameters"]) == {"n_steps": 64, "batch_size": 32, "n_epochs": 1}
        assert (facts["rounds"], facts["drop"], facts["seeds"]) == ("2", "0.5", "[0, 1]")
        assert "torch" in json.loads(facts["versions"])
        assert not {"arm", "seed"} & facts.keys()

    def test_writing_again_gives_the_same_page_but_for_names_of_figures(self, tiny, html, tmp_path):
        write_report(tiny, tmp_path / "again.html")
        uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        assert re.sub(uuid, "", (tmp_path / "again.html").read_text(encoding="utf-8")) == re.sub(uuid, "", html)

    def test_arms_that_score_nothing_have_no_influence_to_show(self, tmp_path):
        write_report(by_hand(tmp_path, arms=("ppo",), scored=()), tmp_path / "report.html")
        titles = Page((tmp_path / "report.html").read_text(encoding="utf-8")).of("h2")
        assert not [title for title in titles if title.startswith("Influence")]
        assert "Learning curves" in titles

    def test_hostile_text_stays_text(self, tmp_path):
        write_report(by_hand(tmp_path, env=HOSTILE, env_kwargs={HOSTILE: HOSTILE}), tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text(encoding="utf-8")
        page = Page(html)
        assert "alert(1)</script>" not in html
        assert not [script for script in page.scripts if "alert(1)" in script]
        assert page.tags("img") == []
        assert page.of("h1") == [f"{HOSTILE}: ppo, iif"]
        assert page.of("title") == [f"{HOSTILE}: ppo, iif · whence"]
        facts = dict(zip(page.of("dt"), page.of("dd"), strict=True))
        assert facts["env"] == HOSTILE
        assert json.loads(facts["env_kwargs"]) == {HOSTILE: HOSTILE}
        assert json.loads(facts["versions"]) == {"torch": HOSTILE}

    def test_hostile_names_of_arms_stay_text_in_table_and_figures(self, tmp_path, monkeypatch):
        monkeypatch.setattr("whence.experiments.config.ARMS", {"ppo": None, "</script><b>": None})
        comparison = by_hand(tmp_path, arms=("ppo", "</script><b>"), scored=("</script><b>",))
        write_report(comparison, tmp_path / "report.html")
        page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert page.of("th") == ["metric", "ppo (null)", "</script><b>"]
        assert page.tags("b") == []
        assert "Influence, </script><b>" in page.of("h2")

    def test_a_failure_leaves_the_page_of_before(self, tmp_path):
        comparison = by_hand(tmp_path / "runs")
        write_report(comparison, tmp_path / "report.html")
        before = (tmp_path / "report.html").read_bytes()
        (comparison.run(comparison.configs[0]).path / "timings.parquet").write_bytes(b"broken")
        with pytest.raises(ValueError, match=r"timings\.parquet cannot be read"):
            write_report(comparison, tmp_path / "report.html")
        assert (tmp_path / "report.html").read_bytes() == before
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["report.html", "runs"]


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

    def test_every_metric_shown_is_one_that_is_measured(self, tiny):
        for entry in next(iter(tiny.summary.values())).values():
            assert METRICS.keys() <= entry.keys()


class TestFigures:
    def test_learning_curves(self, tmp_path):
        # ppo: seeds 0 and 1 reach 0, 1, 2 and 0, 3, 4; iif: 0, 2, 3 and 0, 4, 5.
        figure = learning_curves(by_hand(tmp_path).table("evaluations"))
        low, high, mean = figure.data[:3]
        assert [list(trace.x) for trace in figure.data] == [[0, 1, 2]] * 6
        assert (list(low.y), list(high.y), list(mean.y)) == ([0, 1, 2], [0, 3, 4], [0, 2, 3])
        assert [(trace.name, trace.line.color) for trace in figure.data[2::3]] == [
            ("ppo", COLOURS[0]),
            ("iif", COLOURS[1]),
        ]
        assert list(figure.data[5].y) == [0, 3, 4]
        assert [trace.fill for trace in figure.data[:3]] == [None, "tonexty", None]

    @pytest.mark.parametrize("arms", [["iif", "ppo", "random"], ["iif", "random", "ppo"]])
    def test_the_standard_arm_has_its_colour_wherever_it_stands(self, arms):
        figure = learning_curves(pl.DataFrame({"arm": arms, "round": 0, "test_return": 1.0}))
        colours = {trace.name: trace.line.color for trace in figure.data[2::3]}
        assert colours == {"ppo": COLOURS[0], "iif": COLOURS[1], "random": COLOURS[2]}

    def test_rows_in_any_order_give_the_same_figure(self, tmp_path):
        table = by_hand(tmp_path).table("evaluations")
        turned = pl.concat([part.reverse() for part in table.partition_by("arm", "seed", maintain_order=True)])
        assert learning_curves(turned).to_dict() == learning_curves(table).to_dict()

    def test_dropped_share(self, tmp_path):
        figure = dropped_share(by_hand(tmp_path).table("metrics"))
        assert [pytest.approx(0.1), pytest.approx(0.1)] == list(figure.data[2].y)  # seeds 0 and 1: 0 and 0.2
        assert [pytest.approx(0.2), pytest.approx(0.2)] == list(figure.data[5].y)  # 0.1 and 0.3

    def test_influence_is_that_of_one_arm(self, tmp_path):
        metrics = by_hand(tmp_path, scored=("ppo", "iif")).table("metrics")
        figure = influence_distribution(metrics, "iif")
        # Runs 1 and 3 of four are iif's: quantiles 1 and 3 above their levels.
        assert [list(trace.y) for trace in figure.data] == [[level + 2] * 2 for level in (5, 95, 25, 75, 50)]
        assert [trace.name for trace in figure.data if trace.name] == ["5 to 95%", "25 to 75%", "median"]

    def test_seconds_by_stage(self, tmp_path):
        figure = seconds_by_stage(by_hand(tmp_path).table("timings"))
        assert {trace.name: list(zip(trace.y, trace.x, strict=True)) for trace in figure.data} == {
            "collection": [("ppo", 1.0), ("iif", 1.0)],
            "scoring": [("ppo", 2.0), ("iif", 4.0)],  # 0 and 4; 2 and 6
            "optimisation": [("ppo", 3.0), ("iif", 3.0)],
        }
        assert figure.layout.barmode == "stack"

    def test_more_arms_than_colours(self):
        arms = [f"arm {number}" for number in range(len(COLOURS) + 2)]
        figure = learning_curves(pl.DataFrame({"arm": arms, "round": 0, "test_return": 1.0}))
        assert [trace.name for trace in figure.data[2::3]] == arms
        assert [trace.line.color for trace in figure.data[2::3]] == [*COLOURS[1:], *COLOURS[1:4]]
