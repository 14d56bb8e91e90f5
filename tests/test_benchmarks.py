"""What the studies of rounds write, at the smallest of sizes, and what is made of it."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import typer
from scipy import stats

from test_rounds import model_of, recorded
from whence import Return, attribute, attribute_round
from whence.counterfactual import compute_lds, compute_scores, draw_subsets
from whence.experiments import load_recording
from whence.policies import as_view
from whence.rounds import METHODS
from whence.rounds.replay import open_round
from whence.rounds.schedule import snapshot_scores
from whence.runs import RunDirectory
from whence.sb3 import collect

ROOT = Path(__file__).parent.parent


def read_line(out, kind):
    """The one line that a study of rounds has written."""
    (line,) = (out / "rounds" / f"{kind}.jsonl").read_text().splitlines()
    return json.loads(line)


@pytest.fixture
def study(monkeypatch):
    """The modules of the study of selections."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.faithfulness import selection_tables, selections

    return selection_tables, selections


@pytest.fixture
def rounds(monkeypatch):
    """The modules of the study of rounds."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.faithfulness import datamodels
    from studies.faithfulness import run as faithfulness
    from studies.faithfulness import tables as faithfulness_tables

    return faithfulness, faithfulness_tables, datamodels


@pytest.fixture
def ablations(monkeypatch):
    """The module that takes scores apart."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.faithfulness import ablations

    return ablations


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A round of a tiny FrozenLake, studied and tabulated: the results, the runs, and the module of the tables."""
    out, runs = (tmp_path_factory.mktemp(name) for name in ("results", "runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from studies.faithfulness import ablations, datamodels
        from studies.faithfulness import run as faithfulness
        from studies.faithfulness import tables as faithfulness_tables

        tiny = {"hyperparameters": {"n_steps": 64, "batch_size": 32, "n_epochs": 2}}
        patch.setitem(faithfulness.OPTIMIZERS, "sgd", tiny)
        setup = faithfulness.Setup("lda-code/frozenlake", (2, 2, 2), 2)
        patch.setitem(faithfulness.SETUPS, ("frozenlake", "sgd"), setup)
        small = {"SUBSETS": 3, "STEPS": 400, "TEST_EPISODES": 4, "LEFT_OUT": ((0.05, 0.5), (0.25,))}
        for name, value in small.items():
            patch.setattr(faithfulness, name, value)
        job = faithfulness.Job("frozenlake", "sgd", 0)
        faithfulness.study_run(job, out, runs)
        before = {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
        assert len(before) == 2
        faithfulness.study_run(job, out, runs)
        assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
        for name, value in {"AT_ONCE": 10, "SIZES": (10, 20), "ENVIRONMENTS": ("frozenlake",), "DRAWS": (64,)}.items():
            patch.setattr(datamodels, name, value)
        for _ in range(2):
            datamodels.main(out, runs, "frozenlake-sgd", 40)
        for name, value in {"ENVIRONMENTS": ("frozenlake",), "SUBSETS": 3}.items():
            patch.setattr(ablations, name, value)
        ablations.study_run(job, out, runs)
        faithfulness_tables.main(out, no_pictures=True)
        yield out, runs / job.name


def test_a_round_is_studied_from_end_to_end(results):
    out, run = results
    content = read_line(out, "round")
    assert [content[name] for name in ("env", "optimizer", "seed", "round")] == ["frozenlake", "sgd", 0, 2]
    model, recording = load_recording(RunDirectory.open(run), 2)
    names = list(compute_scores(model.policy, recording, target=Return()))
    assert names == ["snapshot", "crossfit", *METHODS, "advantage", "td-error", "random"]
    lds = pl.DataFrame(content["lds"], infer_schema_length=None)
    of = [("target", 0.5), ("surrogate", 0.5), ("evaluated", 0.5), ("target", 0.9), ("surrogate", 0.9)]
    found = {key: own["score"].to_list() for key, own in lds.group_by("truth", "outcome", "share")}
    assert found == {(truth, *asked): names for truth in ("recorded", "reshuffled") for asked in of}
    removals = pl.DataFrame(content["removals"], infer_schema_length=None)
    assert sorted(removals.filter(outcome="evaluated")["removed"].unique()) == [16]
    assert sorted(removals.filter(outcome="target")["removed"].unique()) == [3, 16, 32]
    assert {"snapshot", "trajectory", "smoothed"} < set(removals["score"].drop_nulls())
    changes = read_line(out, "intervention")["interventions"]
    assert [row["variant"] for row in changes] == ["full", "filtered", "random"]


def test_a_round_is_taken_apart_on_the_trainings_that_are_known(results):
    out, _ = results
    known = read_line(out, "round")
    found = read_line(out, "ablation")
    places = {(row["share"], row["truth"], row["score"]): row["lds"] for row in found["ablations"]}
    for row in known["lds"]:
        if row["outcome"] == "target" and row["score"] in ("snapshot", "unrolled"):
            assert places[row["share"], row["truth"], row["score"]] == pytest.approx(row["lds"])
    assert [row["clipped"] for row in found["clipping"]] == [True, False]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ablations"]["frozenlake-sgd"]["0.5"]["recorded"]["second order"]["lds"]["seeds"] == 1
    assert summary["clipping"]["frozenlake-sgd"]["all"]["not clipped"]["lds"]["rounds"] == 1
    said = (out / "tables.md").read_text()
    assert "What the smoothed score is made of" in said
    assert "| frozenlake-sgd, not clipped | all |" in said


def test_another_run_than_the_one_that_was_studied_is_refused(results, ablations, monkeypatch):
    out, run = results
    known = read_line(out, "round")
    for row in known["lds"]:
        row["lds"] = 0.5 if row["lds"] is None else row["lds"] - 0.1
    model, recording = load_recording(RunDirectory.open(run), 2)
    monkeypatch.setattr(ablations, "SUBSETS", 3)
    with pytest.raises(RuntimeError, match="this is not the training run that was studied"):
        ablations.ablations(model.policy, recording, known, 0)


def test_what_a_record_says_of_itself(ablations):
    model = model_of("Adam", vf_coef=0.0)
    recording = recorded(model)
    round = open_round(model.policy, recording)
    own = ablations.own_terms(round)
    for record in (0, 5, 63):

        def others(view, params, records, record=record):
            said = view(params, view.prepare(records)).log_prob * records.advantages
            return (said.sum() - said[record]) / len(records)

        known = snapshot_scores(round, Return())[record] - snapshot_scores(round, others)[record]
        assert float(own[record]) == pytest.approx(float(known), rel=1e-3)


def test_the_expansion_of_a_short_round_is_nearly_the_round_itself(ablations):
    model = model_of("SGD", n_epochs=1, clip_range=10.0)
    recording = recorded(model)
    kept = torch.ones(4, 64, dtype=torch.bool)
    for row, count in enumerate((0, 1, 2, 4)):
        kept[row, : 5 * count] = False
    known = ablations.outcomes_of_target(model.policy, recording, kept.double(), torch.float64)
    change = known - known[0]
    expanded = ablations.second_order(model.policy, recording, kept)
    assert expanded[0] == 0
    assert np.abs(expanded - change).max() < 0.1 * np.abs(change).max()


def test_ratios_outside_of_the_clip_range(ablations):
    model = model_of(clip_range=0.1)
    recording = recorded(model)
    view = as_view(model.policy)
    torch.manual_seed(0)
    trained_to = {name: own[None] + 0.5 * torch.randn(1, *own.shape) for name, own in recording.end.items()}
    with torch.no_grad():
        own = {name: tensor[0] for name, tensor in trained_to.items()}
        apart = (view(own, view.prepare(recording.records)).log_prob - recording.records.log_probs).exp() - 1
    known = float((apart.abs() > 0.1).double().mean())
    assert ablations.outside(model.policy, recording, trained_to) == pytest.approx(known)
    assert 0 < known < 1


def test_other_scores_are_of_more_trainings(results, rounds):
    _, run = results
    faithfulness, tables, _ = rounds
    model, recording = load_recording(RunDirectory.open(run), 2)
    found = faithfulness.all_scores(model.policy, recording, faithfulness.DRAWS["adam"], target=Return())
    (added,) = found.keys() - compute_scores(model.policy, recording, target=Return()).keys()
    assert added in tables.SCORES
    known = attribute_round(model.policy, recording, target=Return(), method="smoothed", draws=64).scores
    assert np.array_equal(found[added], known.double().numpy())
    assert not np.allclose(found[added], found["smoothed"])


def test_what_is_stored_is_enough_to_hold_another_score_against(results, rounds):
    out, run = results
    faithfulness, _, _ = rounds
    content = read_line(out, "round")
    _, recording = load_recording(RunDirectory.open(run), 2)
    score = recording.records.advantages.double().numpy()
    rows = pl.DataFrame(content["lds"], infer_schema_length=None).filter(score="advantage")
    seed = faithfulness.Job("frozenlake", "sgd", 0).chance(2)
    for share, truth, outcome, found in rows.select("share", "truth", "outcome", "lds").rows():
        kept = draw_subsets(64, share, 3, torch.Generator().manual_seed(seed)).double().numpy()
        stored = np.mean(content["outcomes"][str(share)][truth][outcome], axis=0)
        assert compute_lds(kept @ score, stored)["lds"] == pytest.approx(found, abs=1e-5)


def test_the_target_is_held_against_the_tests_of_each_order(results):
    out, _ = results
    content = read_line(out, "round")
    outcomes = content["outcomes"]["0.5"]["reshuffled"]
    known = []
    for tested in outcomes["evaluated"]:  # of three subsets each
        one, other = (stats.rankdata(values) for values in (np.mean(outcomes["target"], axis=0), tested))
        known.append(None if np.ptp(other) == 0 else pytest.approx(np.corrcoef(one, other)[0, 1]))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["tested"]["frozenlake-sgd"]["0"]["2"]["orders"] == known
    assert len(known) == 2


def test_what_is_studied_is_tabulated(results):
    out, _ = results
    text = (out / "tables.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(sections) == 10 + 1 + 1 + 2 + 2 + 1 + 1 + 1
    whole = summary["lds"]["0.5"]["target"]["reshuffled"]["frozenlake-sgd"]["snapshot"]
    content = read_line(out, "round")
    row = next(row for row in content["lds"] if (row["score"], row["truth"]) == ("snapshot", "reshuffled"))
    assert whole["lds"] == {"mean": row["lds"], "low": None, "high": None, "seeds": 1, "rounds": 1}
    assert summary["phases"]["reshuffled"]["frozenlake-sgd"]["late"]["snapshot"]["lds"] == whole["lds"]
    additive = summary["additive"]["target"]["frozenlake-sgd"]
    assert (additive["trainings"], additive["round"]) == (40, 2)
    content = json.loads((out / "datamodels.jsonl").read_text())
    row = next(row for row in content["ceilings"] if row["outcome"] == "target")
    assert additive["ceiling"] == {name: row[name] for name in ("lds", "low", "high")}
    assert f"| *additive ceiling* | {row['lds']:.3f}" in text
    shown = text.split("## The best sum of scores: the target")[1].splitlines()
    assert any(
        line.startswith(f"| smoothed | {additive['scores']['smoothed']:.3f}".replace("-", "−")) for line in shown
    )
    assert "at random" in text.split("## Test return without 25%")[1]
    assert summary["interventions"]["frozenlake-sgd"]["filtered"]["seeds"] == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"round": 1}, "is of a round that is not studied"), ({"lds": [{"score": "snap"}]}, "no table has: snap")],
)
def test_what_no_table_would_show_is_refused(rounds, tmp_path, changed, said):
    _, tables, _ = rounds
    folder = tmp_path / "rounds"
    folder.mkdir()
    about = {"env": "acrobot", "optimizer": "adam", "seed": 0, "round": 3}
    content = about | {"lds": [{"score": "snapshot"}], "removals": [], "cosines": []} | changed
    (folder / "round.jsonl").write_text(f"{json.dumps(content)}\n")
    other = about | {"round": 5, "interventions": [{"variant": "full", "change": 0.0}]}
    (folder / "intervention.jsonl").write_text(f"{json.dumps(other)}\n")
    with pytest.raises(typer.BadParameter, match=said):
        tables.main(tmp_path, no_pictures=True)


def test_rounds_are_written_in_order(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.stored import read_round, read_rounds, write_round

    def describe(seed, number):
        return {"env": "lake", "optimizer": "sgd", "seed": seed, "round": number}

    places = [(seed, number) for seed in (2, 0, 1) for number in (12, 3)]
    for place in places:
        write_round(tmp_path, "round", describe(*place) | {"lds": 1 / 3})
    rows = read_rounds(tmp_path, "round")
    assert [(row["seed"], row["round"]) for row in rows] == sorted(places)
    assert {row["lds"] for row in rows} == {0.333333}
    assert read_round(tmp_path, "round", describe(1, 12)) == describe(1, 12) | {"lds": 0.333333}
    assert read_round(tmp_path, "round", describe(1, 4)) is None
    assert read_rounds(tmp_path, "selection") == []


def test_rounds_are_chosen_and_seeds_are_drawn(rounds):
    _, tables, _ = rounds
    seeds = {0: [0.2, 0.4, None], 1: [0.5, 0.7, 0.9], 2: [0.1, 0.1, 0.1]}
    rows = [{"seed": seed, "lds": value, "ceiling": 0.5} for seed, values in seeds.items() for value in values]
    found = tables.over_seeds(pl.DataFrame(rows), "lds")
    means = [0.3, 0.7, 0.1]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(means), scale=stats.sem(means))
    assert [found[name] for name in ("mean", "low", "high")] == pytest.approx([np.mean(means), low, high])
    assert (found["seeds"], found["rounds"]) == (3, 8)
    assert tables.over_seeds(pl.DataFrame(rows), "lds", "ceiling")["mean"] == pytest.approx(2 * np.mean(means))
    one = tables.over_seeds(pl.DataFrame(rows[:3]), "lds")
    assert (one["mean"], one["low"], one["seeds"]) == (pytest.approx(0.3), None, 1)
    none = tables.over_seeds(pl.DataFrame(rows).with_columns(ceiling=pl.lit(None, pl.Float64)), "lds", "ceiling")
    assert (none["mean"], none["seeds"]) == (None, 0)


def test_interventions_are_drawn_by_round(rounds):
    _, tables, _ = rounds
    about = {"env": "acrobot", "optimizer": "adam", "group": "acrobot-adam"}
    rows = [
        about | {"seed": seed, "round": number, "variant": variant, "change": float(seed + number)}
        for seed in (0, 1)
        for number in (5, 10)
        for variant in ("full", "filtered", "random")
    ]
    figure = tables.intervention_boxes(pl.DataFrame(rows))
    assert [note.text for note in figure.layout.annotations] == ["acrobot, sgd", "acrobot, adam"]
    filled = [box for box in figure.data if len(box.x)]
    assert [(box.name, box.showlegend, box.xaxis) for box in filled] == [
        ("filtered", True, "x2"),
        ("random", True, "x2"),
    ]
    assert [list(box.x) for box in filled] == [["5", "5", "10", "10"]] * 2
    assert list(filled[0].y) == [5.0, 6.0, 10.0, 11.0]


def test_seeds_draw_nothing_alike(rounds):
    faithfulness, *_ = rounds
    drawn = {faithfulness.Job("acrobot", "sgd", seed).chance(number) for seed in range(3) for number in (3, 15)}
    assert len(drawn) == 6
    assert max(drawn) < 2**31


def row(selection, gain, long, far, kl=1.0, entropy=0.0):
    unit = {"env": "lake", "optimizer": "sgd", "seed": 0, "round": 3, "group": "lake-sgd", "advantages": "gae"}
    about = {"selection": selection, "gain": gain, "all_as_long": long, "all_as_far": far}
    return unit | about | {"kl": kl, "entropy": entropy, "kept": 8.0}


def test_selections_are_held_against_all(study):
    tables, _ = study
    rows = [
        row("all", 1.0, 1.0, 1.0),
        row("all", 3.0, 3.0, 3.0),
        row("iif", 5.0, 4.0, 6.0, kl=3.0, entropy=-0.5),
        row("all, normalised once", 1.5, 1.5, 1.5, kl=2.0),
        row("iif, normalised once", 4.5, 3.5, 2.5, kl=3.0),
    ]
    found = {one["selection"]: one for one in tables.compared(pl.DataFrame(rows)).to_dicts()}
    kinds = ("less", "less as long", "less as far", "kl", "entropy")
    assert [found["iif"][kind] for kind in kinds] == [3.0, 1.0, -1.0, 3.0, -0.5]
    assert [found["all, normalised once"][kind] for kind in kinds] == [-0.5, None, None, 2.0, 0.0]
    assert [found["iif, normalised once"][kind] for kind in kinds] == [3.0, 1.0, 2.0, 1.5, 0.0]


def test_seeds_are_told_apart_by_one_measure(study):
    tables, _ = study
    gains = {0: (1.0, 2.0), 1: (3.0, 3.0)}  # of all, and of the selection
    rows = [
        row(selection, gain, 0.5, 1.0) | {"seed": seed}
        for seed, of in gains.items()
        for selection, gain in zip(("all", "iif"), of, strict=True)
    ]
    found = next(one for one in tables.gain_means(tables.compared(pl.DataFrame(rows))) if one["selection"] == "iif")
    assert found["less"]["seeds"] == [0.5, 0.0]  # each seed's by the two that all gain in the mean
    assert found["less"]["mean"] == 0.25
    assert found["less as far"]["seeds"] == [0.5, 1.0]


def test_shares_of_next_to_nothing_are_not_told(study):
    tables, _ = study
    found = tables.ratio_over([1.0, None, 3.0], [1.0, 5.0, 3.0])
    assert (found["mean"], found["rounds"]) == (1.0, 2)
    assert tables.ratio_over([1.0, 2.0], [-1.0, 1.5])["mean"] is None
    assert tables.ratio_over([1.0], [-1.0])["mean"] is None
    assert tables.ratio_over([None], [1.0])["mean"] is None


def test_records_of_the_policy_itself_judge_as_the_return_does(study):
    _, selections = study
    model = model_of(env="CartPole-v1")
    records = collect(model)
    parts = [records.take(slice(0, 40)), records.take(slice(40, 64))]
    mine = attribute(model.policy, records, target=selections.Elsewhere(parts)).scores
    assert torch.allclose(mine, attribute(model.policy, records, target=Return()).scores, rtol=1e-4, atol=1e-7)


@pytest.fixture
def pages(monkeypatch):
    """The modules that measure pages, without a browser."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.pages import runs as pages_runs
    from studies.pages import tables as pages_tables

    return pages_runs, pages_tables


def times(*seconds):
    """What the summary says of some times."""
    return {"median": sorted(seconds)[len(seconds) // 2], "maximum": max(seconds), "n": len(seconds)}


def make_summary(tables):
    """A summary in which the page of 100,000 records a round is too slow."""
    size = {key: times(0.2, 0.3, 0.4) for key in tables.WORDS}
    sizes = {name: dict(size) for name in tables.SHAPES}
    sizes["20 × 100,000"]["round"] = times(0.6, 0.9, 1.1)
    file = {"bytes": 24_000_000, "usable": times(0.5, 0.7, 1.9)}
    served = {"round": times(0.1, 0.2, 0.3), "frames": times(0.5, 1, 2), "page": times(1)}
    return {"file": file, "served": served, "sizes": sizes, "problems": []}


def test_promises_are_kept_at_the_slowest_repeat(pages):
    _, tables = pages
    summary = make_summary(tables)
    kept = [tables.judge_promise(promise, summary)[2] for promise in tables.PROMISES]
    assert kept == [True, True, True, True, True, False]
    assert tables.judge_promise(tables.PROMISES[1], summary) == (0.7, 1.9, True)
    assert tables.judge_promise(tables.PROMISES[1], {"problems": []}) is None
    assert "no: 1 of 6 promises are missed" in tables.tell_figures(summary)
    assert tables.tell_figures({"file": summary["file"], "problems": []}) == (
        "- **Answer**: yes: all 2 promises hold at the slowest of their repeats; the browser complained of nothing.\n"
        "- **Figure** (medians): file 24.0 MB, usable in 0.70 s."
    )
    first, _, sizes = tables.make_tables(summary)
    assert first.splitlines()[2] == "| the file of all 150 rounds | ≤ 25.0 MB | 24.0 MB | 24.0 MB | 1 | yes |"
    assert first.splitlines()[-1].endswith("| ≤ 1.00 s | 0.90 s | 1.10 s | 3 | **no** |")
    assert "0.90 s (max 1.10 s, × 3.0)" in sizes


def test_figures_replace_what_stood_between_the_marks(pages, tmp_path):
    _, tables = pages
    readme = tmp_path / "README.md"
    marks = "\n".join(f"<!-- {name} -->\nold\n<!-- end of {name} -->" for name in ("figures", "tables"))
    readme.write_text(f"# Pages\n{marks}\nThe end.\n", encoding="utf-8")
    for _ in range(2):
        tables.write_figures(make_summary(tables), readme)
        text = readme.read_text(encoding="utf-8")
        assert "old" not in text
        assert text.count("- **Answer**: no") == 1
        assert text.endswith("<!-- end of tables -->\nThe end.\n")
    with pytest.raises(ValueError, match="no marks <!-- other -->"):
        tables.replace_marked(text, "other", "")


def test_larger_runs_repeat_rounds_under_ids_of_their_own(pages, tmp_path):
    runs, _ = pages
    source = RunDirectory.create(tmp_path / "source", {"env": "Some-v0", "rounds": 2})
    for number in (1, 2):
        columns = {"record_id": [10, 11, 12], "episode_id": [6, 6, 9], "step": [4, 5, 0], "score": [1.0 * number] * 3}
        source.write_round("records", number, pl.DataFrame(columns))
        source.append("metrics", {"round": number, "episode_return": -1.0 * number})
        source.write_policy(number, {"weight": torch.full((2,), number)})
    runs.tile_run(source, tmp_path / "tiled", rounds=3, records=4)
    tiled = RunDirectory.open(tmp_path / "tiled")
    assert (tiled.rounds(), tiled.experiment["rounds"]) == ([1, 2, 3], 3)
    records = pl.concat([tiled.round("records", number) for number in tiled.rounds()])
    assert records["record_id"].to_list() == list(range(12))
    assert records["score"].to_list() == [1, 1, 1, 2] * 3
    assert records["episode_id"].to_list()[:8] == [0, 0, 1, 1000, 2000, 2000, 2001, 3000]
    assert tiled.table("metrics")["episode_return"].to_list() == [-1, -2, -1]
    assert [int(tiled.policy(number)["weight"][0]) for number in (1, 2, 3, 4)] == [1, 2, 1, 2]
    generator = np.random.default_rng(0)
    assert runs.choose_record(source.round("records", 1), generator, late=True) == 11
    assert {runs.choose_record(source.round("records", 1), generator, late=False) for _ in range(50)} == {10, 11, 12}


class TestDiagnosis:
    @pytest.fixture
    def diagnosis(self, monkeypatch):
        """The modules of the study of advantages, at the smallest of sizes."""
        monkeypatch.syspath_prepend(str(ROOT))
        from studies.diagnosis import run as diagnosis
        from studies.diagnosis import tables as diagnosis_tables

        tiny = {"hyperparameters": {"n_steps": 256, "n_epochs": 1}}
        measures = ("visits", "exact", "rollouts")
        setup = diagnosis.Setup("lda-code/frozenlake", (1, 2), 1, measures, tiny, records=5, continuations=2)
        monkeypatch.setitem(diagnosis.SETUPS, "frozenlake", setup)
        return diagnosis, diagnosis_tables

    def test_rounds_are_judged_once_and_tabulated(self, diagnosis, tmp_path):
        study, tables = diagnosis
        jobs = [job for job in study.list_jobs() if job.name.startswith("frozenlake")]
        assert [job.name for job in jobs] == ["frozenlake/seed_0/round_1", "frozenlake/seed_0/round_2"]
        for job in [*jobs, *jobs]:
            study.study_round(job, tmp_path / "out", tmp_path / "runs")
        lines = [json.loads(line) for line in study.results_file(tmp_path / "out").read_text().splitlines()]
        assert [(line["round"], line["measure"]) for line in lines] == [
            (number, measure) for number in (1, 2) for measure in ("exact", "rollouts", "visits")
        ]
        assert [line["records"] for line in lines] == [256, 5, 256] * 2
        before = study.results_file(tmp_path / "out").stat().st_mtime_ns
        study.study_round(jobs[0], tmp_path / "out", tmp_path / "runs")
        assert study.results_file(tmp_path / "out").stat().st_mtime_ns == before
        tables.main(tmp_path / "out")
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())["frozenlake"]
        assert summary["exact"]["2"]["spearman"] == lines[3]["spearman"]
        bottom = summary["visits"]["1"]["bands"]["bottom"]
        assert bottom["mismatch"]["mean"] == lines[2]["bands"][2]["mismatch"]
        assert "| rollouts | 2 | 1 |" in (tmp_path / "out" / "tables.md").read_text()

    def test_exact_advantages_by_hand(self, diagnosis):
        study, _ = diagnosis
        # State 0: action 0 stays without reward, action 1 ends with 1. State 1 cannot be left.
        transitions = {
            0: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 1, 1.0, True)]},
            1: {a: [(1.0, 1, 0.0, True)] for a in (0, 1)},
        }
        values, advantages = study.solve(transitions, np.full((2, 2), 0.5), 0.5)
        value = 0.5 / (1 - 0.25)
        assert values.tolist() == pytest.approx([value, 0])
        assert advantages[0].tolist() == pytest.approx([0.5 * value - value, 1 - value])

    def test_seeds_are_averaged_and_a_claim_needs_an_interval_above_0(self, diagnosis):
        _, tables = diagnosis
        entry = {"mean": 0.5, "low": 0.1, "high": 0.9}
        band = dict.fromkeys(tables.IN_BANDS, 0.25) | {"low": 0.2, "high": 0.3}
        line = {"setup": "frozenlake", "measure": "exact", "round": 2, "records": 9, "episode_return": 0.5}
        line |= dict.fromkeys(tables.ENTRIES, entry) | {"bands": [band | {"band": name} for name in tables.BANDS]}
        (one,) = tables.summarise([line | {"seed": 0}])
        assert (one["seeds"], one["spearman"]) == (1, entry)
        assert one["bands"]["top"]["mismatch"] == {"mean": 0.25, "low": 0.2, "high": 0.3}
        (two,) = tables.summarise([line, line | {"spearman": entry | {"mean": 0.7}}])
        assert (two["seeds"], two["spearman"]["mean"]) == (2, pytest.approx(0.6))
        assert two["spearman"]["low"] < 0  # two seeds are few
        verdicts = [tables.is_confirmed({"low": low, "high": high}) for low, high in ((0.1, 1), (-0.1, 1), (-1, -0.1))]
        assert verdicts == ["yes", "unclear", "no"]
        assert tables.is_confirmed({"low": None, "high": None}) == "unclear"


def test_the_table_of_kills_is_of_the_stored_kills() -> None:
    from studies.reliability.tables import describe_kills

    folder = Path(__file__).parent.parent / "results" / "reliability"
    assert describe_kills(folder / "kills.jsonl") in (folder / "README.md").read_text(encoding="utf-8")
