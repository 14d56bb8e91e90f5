"""A sweep's tables and pictures, what LDA's figures stand beside, and the table of a sweep under way."""

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from whence.errors import Unsupported, WhenceError
from whence.experiments import KeptRun, RunConfig, load_sweep, summarise_sweep
from whence.experiments.rl.presets import presets
from whence.experiments.rl.training import make_curve
from whence.page import write_tables
from whence.page.figures import COLOURS, arm_colours, learning_curves

LAKE = RunConfig(env="FrozenLake-v1", arm="ppo", seed=0, rounds=4, eval_episodes=20)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def finished(config, **of_rounds):
    """A run that rises from 0 to 1, sooner where its arm is not ppo, with the seconds 1 ... 6 a round.

    of_rounds: columns of what is kept of each round.
    """
    steps = np.arange(config.rounds + 1) / config.rounds
    returns = steps ** (1 + config.seed / 10) if config.arm == "ppo" else steps ** (0.5 + config.seed / 10)
    evaluations = pl.DataFrame({"round": np.arange(len(returns)), "test_return": returns, "standard_error": 0.01})
    columns = [f"{stage}_{clock}" for stage in ("collection", "scoring", "optimisation") for clock in ("cpu", "wall")]
    seconds = pl.DataFrame({name: [float(place)] * config.rounds for place, name in enumerate(columns, start=1)})
    rounds = pl.DataFrame({"round": np.arange(1, config.rounds + 1), **of_rounds})
    tables = {"evaluations": evaluations, "rounds": rounds, "seconds": seconds}
    return KeptRun(config, tables, make_curve(config, evaluations, seconds))


def results(config=LAKE, **seeds):
    """One experiment, with each arm's seeds; underscores stand for hyphens."""
    labels = {}
    for word, own in seeds.items():
        arm = word.replace("_", "-")
        labels[arm] = {seed: finished(replace(config, arm=arm, seed=seed)) for seed in own}
    return {"lake": labels}


def written(found, out, **options):
    return write_tables(found, summarise_sweep(found), out, **{"pictures": False, **options})


def tables(text):
    """The tables of a Markdown text: a dict for each row."""
    found, lines = [], [*text.splitlines(), ""]
    for line, after in pairwise(lines):
        if not line.startswith("| "):
            continue
        cells = line[2:-2].split(" | ")
        if after.startswith("| ---"):
            headings = cells
            found.append([])
        elif not line.startswith("| ---"):
            found[-1].append(dict(zip(headings, cells, strict=True)))
    return found


def of_lda(preset="lda-code/frozenlake", arms=("ppo", "iif"), **changed):
    config = RunConfig(**{**presets()[preset], "arm": "ppo", "seed": 0, **changed})
    return results(config, **{arm: [0, 1] for arm in arms})


def ldas(found, out):
    """LDA's rows of rounds and time saved."""
    return [row for row in tables(written(found, out))[0] if row["arm"].startswith("*")]


class TestTables:
    def test_they_hold_what_the_summary_says(self, tmp_path):
        found = results(ppo=[0, 1, 2], iif=[0, 1])
        summary = summarise_sweep(found)["lake"]
        text = written(found, tmp_path)
        assert (tmp_path / "tables.md").read_text() == text
        assert json.loads((tmp_path / "summary.json").read_text()) == {"lake": summary}
        names = {
            "SE_ave": "se_ave",
            "SE_peak": "se_peak",
            "SE_ave, every maximum": "se_ave_literal",
            "SE_peak, every maximum": "se_peak_literal",
            "RT_peak": "rt_peak",
            "RT_peak (paper's)": "rt_peak_paper",
            "levels never reached": "unreached",
        }
        saved, returns, _ = tables(text)
        over = {"SE_ave, against the null": "se_ave", "SE_ave, every maximum, against the null": "se_ave_literal"}
        assert list(saved[0]) == ["arm", "seeds", *names, *over]
        assert [row["arm"] for row in saved] == ["ppo (null)", "iif"]
        for row, arm in zip(saved, ("ppo", "iif"), strict=True):
            for heading, metric in names.items():
                entry = summary[arm][metric]
                shown = " ".join(f"{entry[end]:.1%}" for end in ("mean", "low", "high"))
                assert re.sub(r"[\[\],]", "", row[heading]) == shown
        for heading, metric in over.items():
            entry = summary["iif"][metric]["against_null"]
            shown = " ".join(f"{entry[end]:.1%}" for end in ("mean", "low", "high"))
            assert re.sub(r"[\[\],]", "", saved[1][heading]) == shown
            assert saved[0][heading] == ""
        assert len({row[heading] for row in saved for heading in ("SE_ave", "SE_peak", "RT_peak")}) > 3
        for row, arm in zip(returns, ("ppo", "iif"), strict=True):
            assert row["final return"].split()[0] == f"{summary[arm]['final_return']['mean']:.3g}"
            assert row["mean return"].split()[0] == f"{summary[arm]['auc']['mean']:.3g}"
        for heading, metric in (("final return less ppo's", "final_return"), ("mean return less ppo's", "auc")):
            assert returns[1][heading].split()[0] == f"{summary['iif'][metric]['differences']['ppo']['mean']:.3g}"
        assert float(returns[1]["mean return less ppo's"].split()[0]) > 0.1
        for row, other in zip(returns, ("ppo", "iif"), strict=True):
            assert row[f"mean return less {other}'s"] == ""
        assert returns[0]["mean return less iif's"].split()[0] == (
            f"{summary['ppo']['auc']['differences']['iif']['mean']:.3g}"
        )

    def test_seeds_and_shared_seeds_are_told(self, tmp_path):
        text = written(results(ppo=[0, 1, 2, 3], iif=[2, 3, 7], random=[1]), tmp_path)
        assert "Finished runs: ppo 4 (seeds 0 to 3), iif 3 (seeds 2, 3, 7), random 1 (seed 1)." in text
        saved, returns, _ = tables(text)
        assert [row["seeds"] for row in saved] == [row["seeds"] for row in returns] == ["4", "3", "1"]
        assert [row["seeds shared with ppo"] for row in returns] == ["", "2", "1"]

    @pytest.mark.parametrize("seeds", [{"ppo": [0, 1, 2], "iif": [0]}, {"ppo": [0], "iif": [0, 1, 2]}])
    def test_one_seed_makes_no_interval(self, tmp_path, seeds):
        saved, returns, _ = tables(written(results(**seeds), tmp_path))
        iif = saved[1]
        assert iif["SE_ave"].endswith("%")
        assert not any("[" in cell for cell in iif.values())
        assert "[" not in returns[1]["mean return less ppo's"]
        assert ("[" in saved[0]["SE_ave"]) == (len(seeds["ppo"]) > 1)

    def test_of_rounds_what_was_kept_is_told(self, tmp_path):
        arms = {"ppo": {}, "iif": {"fell_back": [1, 0, 0, 1], "train/approx_kl": [0.25, None, 0.5, 0.75]}}
        found = {"lake": {arm: {0: finished(replace(LAKE, arm=arm), **kept)} for arm, kept in arms.items()}}
        found["lake"]["iif"][1] = finished(replace(LAKE, arm="iif", seed=1), fell_back=[0, 0, 0, 0])
        _, _, of_rounds, _ = tables(written(found, tmp_path))
        assert of_rounds == [
            {"arm": "ppo", "rounds in which the guard fell back": "", "divergence (KL)": ""},
            {"arm": "iif", "rounds in which the guard fell back": "25.0%", "divergence (KL)": "0.5"},
        ]

    def test_ratios_of_a_round_that_was_scaled_are_not_told(self, tmp_path):
        clipped = {"train/clip_fraction": [0.25] * 4}
        arms = {"ppo": clipped, "ppo-matched": clipped | {"train/update_scale": [2.0] * 4}}
        found = {"lake": {arm: {0: finished(replace(LAKE, arm=arm), **kept)} for arm, kept in arms.items()}}
        _, _, of_rounds, _ = tables(written(found, tmp_path))
        assert [row["ratios clipped"] for row in of_rounds] == ["25.0%", ""]
        assert of_rounds[1]["update scaled by"] == "2"

    def test_one_round_that_took_long_does_not_count(self, tmp_path):
        found = results(ppo=[0], iif=[0])
        kept = found["lake"]["iif"][0]
        slow = kept.tables["seconds"].with_columns(
            optimisation_wall=pl.when(pl.int_range(pl.len()) == 1).then(2657.0).otherwise("optimisation_wall")
        )
        found["lake"]["iif"] = {0: replace(kept, tables={**kept.tables, "seconds": slow})}
        assert tables(written(found, tmp_path))[2][1]["optimisation, wall"] == "6.000"

    def test_seconds_of_the_process_and_of_the_clock_stand_beside_each_other(self, tmp_path):
        _, _, seconds = tables(written(results(ppo=[0, 1], iif=[0]), tmp_path))
        assert seconds[1] == {
            "arm": "iif",
            "collection, CPU": "1.000",
            "collection, wall": "2.000",
            "scoring, CPU": "3.000",
            "scoring, wall": "4.000",
            "optimisation, CPU": "5.000",
            "optimisation, wall": "6.000",
        }

    def test_what_they_mean_is_told(self, tmp_path):
        key = written(results(ppo=[0, 1]), tmp_path).partition("\n## ")[0]
        for term in (
            "SE_ave",
            "RT_peak",
            "Levels",
            "brackets",
            "null",
            "Every maximum",
            "never reached",
            "Less another",
        ):
            assert term in key

    def test_the_set_up_tells_what_is_no_default(self, tmp_path):
        config = replace(LAKE, env_kwargs={"desc": ["SG"]}, n_envs=4, warmup=2, policy="CnnPolicy", eval_every=2)
        config = replace(config, target="action", target_args={"observation": 0, "action": 1})
        text = written(results(config, ppo=[0], iif=[0]), tmp_path)
        (line,) = (line for line in text.splitlines() if line.startswith("FrozenLake-v1: "))
        assert line == (
            "FrozenLake-v1: 4 rounds; 20 evaluation episodes every 2 rounds; Adam, SB3's hyper-parameters; "
            'env_kwargs {"desc": ["SG"]}; n_envs 4; policy "CnnPolicy"; warmup 2; target "action"; '
            'target_args {"observation": 0, "action": 1}; drop 0.125 unless the arm\'s name says another.'
        )

    def test_the_usual_share_is_that_of_a_run_that_drops_it(self, tmp_path):
        text = written(shares(), tmp_path)
        assert "drop 0.125 unless the arm's name says another" in text
        del (found := shares())["lake"]["iif"]
        assert "drop 0.25" not in written(found, tmp_path)

    def test_an_experiment_without_ppo_is_told_of(self, tmp_path):
        assert "No run of ppo is finished" in written(results(iif=[0]), tmp_path)

    def test_nothing_there_is_told(self, tmp_path):
        with pytest.raises(WhenceError, match="holds no finished run of a sweep"):
            load_sweep(tmp_path)


def shares(**more):
    """An experiment whose ppo is not finished: iif at 0.25 and at its own share, 0.125."""
    return {
        "lake": {
            "iif-drop0.25": {0: finished(replace(LAKE, arm="iif", drop=0.25))},
            "iif": {0: finished(replace(LAKE, arm="iif", drop=0.125))},
            **more,
        }
    }


class TestLDA:
    def test_its_figures_stand_under_the_headings_that_mean_the_same(self, tmp_path):
        (row,) = ldas(of_lda(), tmp_path)
        assert {heading: cell for heading, cell in row.items() if cell} == {
            "arm": "*LDA's iif*",
            "seeds": "3",
            "SE_ave, every maximum": "33.7% ± 3.4%",
            "SE_peak, every maximum": "19.6% ± 8.4%",
            "RT_peak (paper's)": "31.3% ± 3.3%",
        }

    def test_its_seconds_are_of_the_clock(self, tmp_path):
        text = written(of_lda(), tmp_path)
        assert [row for row in tables(text)[2] if row["arm"] == "*LDA's iif*"] == [
            {
                "arm": "*LDA's iif*",
                **{"collection, CPU": "", "collection, wall": ""},
                **{"scoring, CPU": "", "scoring, wall": "0.11"},
                **{"optimisation, CPU": "", "optimisation, wall": "1.51"},
            }
        ]
        assert "Its seconds are wall-clock, on another machine: 93.85 s of ppo and 82.15 s of iif" in text
        assert "64.64 s of iif until ppo's peak" in text
        assert "50 rounds of ppo's optimisation alone would take 100 s" in text

    def test_each_share_has_its_own_row(self, tmp_path):
        for drop, se_ave in ((0.125, "23.5%"), (0.25, "30.5%"), (0.5, "33.7%"), (1.0, "32.7%")):
            (row,) = ldas(of_lda(drop=drop), tmp_path)
            assert row["SE_ave, every maximum"].startswith(f"{se_ave} ± ")
        assert ldas(of_lda(drop=0.3), tmp_path) == []
        assert ldas(of_lda(arms=("ppo", "random")), tmp_path) == []

    @pytest.mark.parametrize(
        "changed",
        [
            {"rounds": 5},
            {"env_kwargs": {"map_name": "4x4", "is_slippery": True}},
            {"optimizer": "Adam"},
            {"n_envs": 2},
            {"warmup": 1},
            {"policy_kwargs": {"net_arch": [8]}},
            {"hyperparameters": {**presets()["lda-code/frozenlake"]["hyperparameters"], "learning_rate": 0.01}},
        ],
        ids=lambda changed: next(iter(changed)),
    )
    def test_what_is_not_its_own_setting_has_none(self, tmp_path, changed):
        text = written(of_lda(**changed), tmp_path)
        assert "*LDA" not in text
        assert "LDA's rows" not in text

    def test_clipped_gradients_are_told_of_and_have_none(self, tmp_path):
        text = written(of_lda("paper/frozenlake"), tmp_path)
        assert "*LDA" not in text
        assert "clipped to a norm of 0.5, as LDA's paper prints. LDA's code does not clip" in text
        assert "beside lda-code/frozenlake only" in text

    def test_other_evaluations_are_told_in_its_row(self, tmp_path):
        preset = {"rounds": 500, "eval_every": 5, "eval_episodes": 50}
        (row,) = ldas(of_lda("lda-code/bipedalwalker", **preset), tmp_path)
        assert row["arm"] == "*LDA's iif (its evaluations: every round, 100 episodes)*"
        assert row["RT_peak (paper's)"] == "29.2% ± 0.7%"


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


@pytest.fixture
def drawn(monkeypatch):
    """What would be drawn: the traces of each picture, in order, without a browser."""
    seen = []

    def to_image(figure, format):
        seen.append(figure)
        return b"<svg/>"

    def write_image(figure, file, format):
        file.write_bytes(to_image(figure, format))

    monkeypatch.setattr("plotly.graph_objects.Figure.to_image", to_image)
    monkeypatch.setattr("plotly.graph_objects.Figure.write_image", write_image)
    return seen


def pictured(found, out, seen):
    """The pictures that a text shows, and the arms in each."""
    text = written(found, out, pictures=True)
    links = re.findall(r"^!\[.*\]\((.*)\)$", text, re.MULTILINE)
    assert all((out / link).is_file() for link in links)
    assert (out / "tables.md").read_text() == text
    return {link: [trace.name for trace in one.data if trace.name] for link, one in zip(links, seen, strict=True)}


class TestPictures:
    def test_arms_shares_and_controls_have_pictures_of_their_own(self, tmp_path, drawn):
        found = results(ppo=[0, 1], iif=[0], random=[0], ppo_matched=[0])
        found["lake"]["ppo-lr-0.5"] = {0: finished(replace(LAKE, arm="ppo-lr-0.5"))}
        found["lake"]["iif-drop0.25"] = {0: finished(replace(LAKE, arm="iif", drop=0.25))}
        assert pictured(found, tmp_path, drawn) == {
            "figures/lake/arms.svg": ["ppo", "iif", "random"],
            "figures/lake/drop.svg": ["ppo", "iif", "iif-drop0.25"],
            "figures/lake/controls.svg": ["ppo", "iif", "ppo-matched", "ppo-lr-0.5"],
        }

    def test_no_experiments_pictures_replace_anothers(self, tmp_path, drawn):
        names = ("lake", "lake-drop", "lake.svg", "drop.svg")
        one = {**shares()["lake"], "ppo": {0: finished(LAKE)}}
        assert len(pictured(dict.fromkeys(names, one), tmp_path, drawn)) == 8

    def test_shares_without_the_usual_one(self, tmp_path, drawn):
        found = results(ppo=[0])
        for drop in (0.25, 1.0):
            found["lake"][f"iif-drop{drop:g}"] = {0: finished(replace(LAKE, arm="iif", drop=drop))}
        both = ["ppo", "iif-drop0.25", "iif-drop1"]
        assert pictured(found, tmp_path, drawn) == {"figures/lake/drop.svg": both}
        del found["lake"]["iif-drop1"]
        drawn.clear()
        assert pictured(found, tmp_path, drawn) == {"figures/lake/arms.svg": both[:2]}

    def test_shares_alone_so_far(self, tmp_path, drawn):
        found = {"lake": {"iif-drop1": {0: finished(replace(LAKE, arm="iif", drop=1.0))}}}
        assert pictured(found, tmp_path, drawn) == {"figures/lake/arms.svg": ["iif-drop1"]}
        found["lake"]["iif-drop0.25"] = {0: finished(replace(LAKE, arm="iif", drop=0.25))}
        drawn.clear()
        assert pictured(found, tmp_path, drawn) == {"figures/lake/drop.svg": ["iif-drop1", "iif-drop0.25"]}

    def test_ppo_alone_has_a_picture(self, tmp_path, drawn):
        assert pictured(results(ppo=[0]), tmp_path, drawn) == {"figures/lake/arms.svg": ["ppo"]}

    def test_long_legends_have_room(self, tmp_path, drawn):
        arms = ("ppo", "iif", "mean", "nonpositive", "negative_random", "random", "advantage_1", "advantage_2")
        pictured(results(**{arm: [0] for arm in arms}), tmp_path, drawn)
        assert drawn[0].layout.height > 340

    def test_no_two_arms_look_alike(self):
        arms = ["ppo", *(f"arm {number}" for number in range(3 * len(COLOURS)))]
        figure = learning_curves(pl.DataFrame({"arm": arms, "round": 0, "test_return": 1.0}), arm_colours(arms))
        looks = [(trace.line.color, trace.line.dash) for trace in figure.data]
        assert len(looks) == len(set(looks)) == len(arms)

    @needs_browser
    def test_they_are_drawn(self, tmp_path):
        pytest.importorskip("kaleido")
        written({"lake": {**shares()["lake"], **results(ppo=[0, 1])["lake"]}}, tmp_path, pictures=True)
        for name in ("arms", "drop"):
            content = (tmp_path / f"figures/lake/{name}.svg").read_text()
            assert content.startswith("<svg")
            assert "mean test return" in content

    def test_without_a_browser_the_tables_are_there(self, tmp_path, monkeypatch):
        def to_image(*_, **__):
            raise RuntimeError("Kaleido requires Google Chrome to be installed.")

        monkeypatch.setattr("plotly.graph_objects.Figure.to_image", to_image)
        with pytest.raises(Unsupported, match=r"arms\.svg cannot be drawn: Kaleido requires .* --no-pictures"):
            written(results(ppo=[0]), tmp_path, pictures=True)
        assert "![" not in (tmp_path / "tables.md").read_text()
        assert (tmp_path / "summary.json").is_file()

    def test_a_full_disk_is_no_missing_browser(self, tmp_path, monkeypatch):
        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("plotly.graph_objects.Figure.to_image", full)
        monkeypatch.setattr("plotly.graph_objects.Figure.write_image", full)
        with pytest.raises(OSError, match="No space left"):
            written(results(ppo=[0]), tmp_path, pictures=True)
