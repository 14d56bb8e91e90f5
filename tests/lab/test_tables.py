"""A sweep's tables, and the table of a sweep under way."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from whence.core import WhenceError
from whence.lab import KeptRun, load_sweep, summarise_sweep, write_tables
from whence.lab.agents import RunConfig
from whence.lab.agents.training import make_curve
from whence.page.figures import COLOURS, arm_colours, over_rounds

LAKE = RunConfig(env="FrozenLake-v1", arm="ppo", seed=0, rounds=4, eval_episodes=20)


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


def written(found, out):
    return write_tables(found, summarise_sweep(found), out)


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


def show_interval(entry):
    return "{mean:.1%} [{low:.1%}, {high:.1%}]".format(**entry)


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
                assert row[heading] == show_interval(summary[arm][metric])
        for heading, metric in over.items():
            assert saved[1][heading] == show_interval(summary["iif"][metric]["against_null"])
            assert saved[0][heading] == ""
        assert len({row[heading] for row in saved for heading in ("SE_ave", "SE_peak", "RT_peak")}) > 3
        for row, arm, other in zip(returns, ("ppo", "iif"), ("iif", "ppo"), strict=True):
            finals, means = summary[arm]["final_return"], summary[arm]["auc"]
            assert row["final return"].split()[0] == f"{finals['mean']:.3g}"
            assert row["mean return"].split()[0] == f"{means['mean']:.3g}"
            assert row[f"mean return less {arm}'s"] == ""
            assert row[f"mean return less {other}'s"].split()[0] == f"{means['differences'][other]['mean']:.3g}"
        assert returns[1]["final return less ppo's"].split()[0] == f"{finals['differences']['ppo']['mean']:.3g}"
        assert float(returns[1]["mean return less ppo's"].split()[0]) > 0.1

    def test_seeds_and_shared_seeds_are_told(self, tmp_path):
        text = written(results(ppo=[0, 1, 2, 3], iif=[2, 3, 7], random=[1]), tmp_path)
        assert "Seeds of the finished runs: ppo 0, 1, 2, 3; iif 2, 3, 7; random 1." in text
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
        arms = {"ppo": {}, "iif": {"train/approx_kl": [0.25, None, 0.5, 0.75]}}
        found = {"lake": {arm: {0: finished(replace(LAKE, arm=arm), **kept)} for arm, kept in arms.items()}}
        found["lake"]["iif"][1] = finished(replace(LAKE, arm="iif", seed=1))
        _, _, of_rounds, _ = tables(written(found, tmp_path))
        assert [row["divergence (KL)"] for row in of_rounds] == ["", "0.5"]
        assert all(row.keys() == {"arm", "divergence (KL)"} for row in of_rounds)

    def test_ratios_of_a_round_that_was_scaled_are_not_told(self, tmp_path):
        clipped = {"train/clip_fraction": [0.25] * 4}
        arms = {"ppo": clipped, "ppo-matched": clipped | {"train/update_scale": [2.0] * 4}}
        found = {"lake": {arm: {0: finished(replace(LAKE, arm=arm), **kept)} for arm, kept in arms.items()}}
        _, _, of_rounds, _ = tables(written(found, tmp_path))
        assert [row["ratios clipped"] for row in of_rounds] == ["25.0%", ""]
        assert of_rounds[1]["update scaled by"] == "2"

    def test_seconds_of_the_process_and_of_the_clock_without_one_round_that_took_long(self, tmp_path):
        found = results(ppo=[0, 1], iif=[0])
        kept = found["lake"]["iif"][0]
        slow = kept.tables["seconds"].with_columns(
            optimisation_wall=pl.when(pl.int_range(pl.len()) == 1).then(2657.0).otherwise("optimisation_wall")
        )
        found["lake"]["iif"] = {0: replace(kept, tables={**kept.tables, "seconds": slow})}
        _, _, seconds = tables(written(found, tmp_path))
        assert seconds[1] == {
            "arm": "iif",
            "collection, CPU": "1.000",
            "collection, wall": "2.000",
            "scoring, CPU": "3.000",
            "scoring, wall": "4.000",
            "optimisation, CPU": "5.000",
            "optimisation, wall": "6.000",
        }

    def test_the_set_up_tells_what_is_no_default(self, tmp_path):
        config = replace(LAKE, env_kwargs={"desc": ["SG"]}, n_envs=4, warmup=2, policy="CnnPolicy", eval_every=2)
        config = replace(config, target="action", target_args={"observation": 0, "action": 1})
        text = written(results(config, ppo=[0], iif=[0]), tmp_path)
        (line,) = (line for line in text.splitlines() if line.startswith("FrozenLake-v1: "))
        assert line == (
            'FrozenLake-v1: env_kwargs {"desc": ["SG"]}; n_envs 4; policy "CnnPolicy"; warmup 2; target "action"; '
            'target_args {"observation": 0, "action": 1}; rounds 4; eval_episodes 20; eval_every 2; optimizer "Adam"; '
            "drop 0.125 unless the arm's name says another."
        )

    def test_the_usual_share_is_that_of_a_run_that_drops_it(self, tmp_path):
        shares = {"iif-drop0.25": 0.25, "iif": 0.125}  # of an experiment whose ppo is not finished
        found = {"lake": {label: {0: finished(replace(LAKE, arm="iif", drop=drop))} for label, drop in shares.items()}}
        assert "drop 0.125 unless the arm's name says another" in written(found, tmp_path)
        del found["lake"]["iif"]
        assert "drop 0.25" not in written(found, tmp_path)

    def test_what_is_not_there_is_told(self, tmp_path):
        with pytest.raises(WhenceError, match="holds no finished run of a sweep"):
            load_sweep(tmp_path)
        assert "No run of ppo is finished" in written(results(iif=[0]), tmp_path)


def test_no_two_arms_look_alike():
    arms = ["ppo", *(f"arm {number}" for number in range(3 * len(COLOURS)))]
    figure = over_rounds(
        pl.DataFrame({"arm": arms, "round": 0, "test_return": 1.0}), "test_return", "mean", arm_colours(arms, "ppo")
    )
    looks = [(trace.line.color, trace.line.dash) for trace in figure.data]
    assert len(looks) == len(set(looks)) == len(arms)
