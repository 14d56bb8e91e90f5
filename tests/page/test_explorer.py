import base64
import gzip
import io
import json
import os

import numpy as np
import polars as pl
import pytest
from PIL import Image

from helpers.explored_runs import HOSTILE, run_of, table_of
from whence.core import WhenceError
from whence.page import ExploredRun, build_detail, build_round, describe_runs, gather_moment, query_records
from whence.page.content.frames import WIDTH, encode_frames, replay_moments
from whence.page.content.record_grid import Search, build_pivot
from whence.page.content.rounds import ROWS, describe_trust, order_strip
from whence.page.html import NOT_EMBEDDED, embed_rounds, list_latest
from whence.runs import RunDirectory, write_flag
from whence.sb3.episodes import read_episode
from whence.sb3.episodes.episode_replay import EpisodeReplay
from whence.scores.influence import is_significant
from whence.scores.moments import find_moment, find_moments


@pytest.fixture
def lake(tmp_path):
    return run_of(tmp_path / "lake")


def plain(value):
    """Fail unless a value is JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


class TestPageObject:
    def test_a_run(self, lake):
        page = plain(describe_runs([lake]))
        (run,) = page["runs"]
        assert (page["mode"], page["kind"]) == ("served", "steps")
        assert (run["label"], run["planned"], run["finished"], run["rounds"]) == ("iif, seed 3", 2, False, [1])
        assert run["series"] == {"episode_return": [1.0], "dropped_share": [0.25]}
        keys = [column["key"] for column in run["columns"]]
        assert keys[:4] == ["record_id", "score", "error", "keep"]
        assert {column["kind"] for column in run["columns"]} <= {"score", "error", "keep", "reason", "text", "number"}

    def test_a_run_without_a_plan_is_finished_when_nothing_changes(self, tmp_path):
        run = run_of(tmp_path / "lake", config={"rule": "IIF(drop=0.5)"})
        assert not run.is_finished()
        os.utime(tmp_path / "lake" / "records" / "round_00001.parquet", (0, 0))
        assert run.is_finished()

    def test_a_run_is_live_as_long_as_a_writer_holds_it(self, tmp_path):
        run = run_of(tmp_path / "lake")
        writer = RunDirectory.begin(tmp_path / "other", {"env": "Some-v0"}, save_every=None)
        other = ExploredRun(tmp_path / "other")
        writer.write_round("records", 1, table_of())
        assert describe_runs([other])["runs"][0]["live"]
        writer.release()
        (shown,) = describe_runs([other])["runs"]
        assert (shown["live"], shown["finished"]) == (False, False)  # its last round is a moment old
        writer.hold()  # a look does not stand in the way
        assert other.is_live()
        writer.release()
        assert not describe_runs([run], [[1]])["runs"][0]["live"]  # a file

    def test_returns_and_lengths_are_of_the_episodes_that_ended_in_the_round(self, tmp_path):
        """Three episodes of 4, 6 and 5 steps, the middle one in two rounds; the last has not ended."""
        episodes, steps = np.repeat([0, 1, 2], [4, 6, 5]), np.concatenate([np.arange(n) for n in (4, 6, 5)])
        ends = ["terminated" if at in (3, 9) else None for at in range(15)]
        whole = table_of(15, episode_id=episodes, step=steps, end=ends, reward=1.0 + episodes)
        run = run_of(tmp_path / "lake", whole[:7])
        run.directory.write_round("records", 2, whole[7:])
        run.directory.append("metrics", {"round": 2, "episode_return": 8.0, "dropped_share": 0.25})
        (shown,) = describe_runs([run])["runs"]
        assert shown["series"]["round_return"] == [4.0, 12.0]
        assert shown["series"]["round_length"] == [4.0, 6.0]
        assert dict(list_latest(run.directory))["return of an episode"] == "12"
        assert dict(list_latest(run.directory))["return, last 100 episodes"] == "8"

    def test_language_models_have_responses(self, tmp_path):
        table = pl.DataFrame(
            {"record_id": [0, 1], "prompt": ["2+2=", HOSTILE], "response": ["4", "5"], "score": [1.0, -1]}
        )
        run = run_of(tmp_path / "sums", table, {"kind": "language"})
        page = describe_runs([run])
        assert page["kind"] == "responses"
        keys = [column["key"] for column in page["runs"][0]["columns"]]
        assert keys == ["record_id", "score", "response", "prompt", "flag"]
        shown = plain(build_round(run, 1))
        assert [moment["record"] for moment in shown["worst"]] == [1]
        assert shown["groupings"] == []
        opened = plain(build_detail(run, 1, 1))
        assert (opened["prompt"], opened["response"]) == (HOSTILE, "5")


def responses_of(**columns):
    """Two prompts with three and one responses; the first prompt is longer than the page shows."""
    long = "p" * 30_000
    table = {
        "record_id": [0, 1, 2, 3],
        "prompt": [long, long, "q", long],
        "response": ["a", HOSTILE, "c", "d"],
        "reward": [0.0, 1.0, 0.5, 1.0],
        "score": [-1.0, 2.0, -3.0, 0.5],
        "keep": [False, True, False, True],
    }
    return pl.DataFrame(table | columns, strict=False)


class TestResponses:
    def test_the_responses_to_the_same_prompt(self, tmp_path, monkeypatch):
        run = run_of(
            tmp_path / "sums", responses_of(), {"kind": "language", "target": {"target": "ValidationLoss", "rows": 16}}
        )
        opened = plain(build_detail(run, 1, 1))
        assert len(opened["prompt"]) == 20_000
        assert opened["targets"][0]["name"] == "likelihood of the demonstrations"
        group = opened["group"]
        assert group["total"] == 3
        shown = [(one["record"], one["reward"], one["dropped"]) for one in group["responses"]]
        assert shown == [(1, 1.0, False), (3, 1.0, False), (0, 0.0, True)]
        assert plain(build_detail(run, 1, 2))["group"]["total"] == 1
        monkeypatch.setattr("whence.page.content.responses.GROUP", 2)
        opened = plain(build_detail(run, 1, 1))
        assert (len(opened["group"]["responses"]), opened["group"]["total"]) == (2, 3)

    def test_a_file_holds_of_an_opened_record_what_a_server_tells(self, tmp_path):
        run = run_of(tmp_path / "lake")
        write_flag(run.directory.path, 1, 0, "odd")
        ((_, text),) = embed_rounds([run], [[1]])
        details = json.loads(gzip.decompress(base64.b64decode(text)))["details"]
        assert details["0"]["flag"] == "odd"
        for record, detail in details.items():
            served = plain(build_detail(run, 1, int(record)))
            assert detail.keys() == served.keys()
            assert detail["flag"] == served["flag"]
            assert detail["window"]["record_ids"] == served["window"]["record_ids"]
            assert detail["window"]["advantages"] == pytest.approx(served["window"]["advantages"], rel=1e-3)

    def test_a_file_holds_each_response_once(self, tmp_path):
        run = run_of(tmp_path / "sums", responses_of(), {"kind": "language", "rounds": 1, "seed": 0})
        ((_, text),) = embed_rounds([run], [[1]])
        content = json.loads(gzip.decompress(base64.b64decode(text)))
        assert set(content["details"]) == {"0", "1", "2", "3"}
        assert "group" not in content["details"]["1"]
        (group,) = content["groups"]  # of the prompt with several responses
        assert [one["record"] for one in group["responses"]] == [1, 3, 0]
        assert all("response" not in one for one in group["responses"])
        assert content["round"]["worst"][0]["text"] == "c"


class TestRound:
    def test_the_strip_is_in_time_order(self, tmp_path):
        run = run_of(tmp_path / "lake", table_of().sample(fraction=1, shuffle=True, seed=0))
        shown = plain(build_round(run, 1))
        strip = shown["strip"]
        assert strip["record_ids"] == list(range(60))
        assert strip["scores"] == table_of()["score"].to_list()
        assert strip["dropped"] == [int(not keep) for keep in table_of()["keep"]]
        assert [(e["id"], e["start"], e["length"], e["first_step"], e["return"]) for e in strip["episodes"]] == [
            (k, 10 * k, 10, 0, 10.0) for k in range(6)
        ]

    def test_moments_from_either_end(self, lake):
        shown = plain(build_round(lake, 1, rows=True))
        assert shown["worst"][0]["score"] == -30
        assert shown["best"][0]["score"] == 29
        assert shown["worst"][0] | {"record": 0, "significant": True} == shown["worst"][0]
        assert all(a["score"] <= b["score"] for a, b in zip(shown["worst"], shown["worst"][1:], strict=False))
        assert sorted(row["record_id"] for row in shown["rows"]) == list(range(60))  # as many as the file has room for
        assert len(shown["rows"]) <= ROWS
        assert [entry["key"] for entry in shown["groupings"]] == ["action", "region", "step", "keep"]

    def test_a_round_without_scores_that_cannot_be_scored_says_why(self, tmp_path):
        run = run_of(tmp_path / "lake", table_of(score=None, error=None))
        shown = plain(build_round(run, 1))
        assert (shown["scored"], shown["worst"], shown["trust"]) == (False, [], [])
        assert any("scoring it now failed" in note for note in shown["notes"])

    def test_actions_are_those_that_the_environment_took(self, tmp_path):
        space = {"type": "Box", "low": -2.0, "high": 1.0, "shape": [1], "dtype": "float32"}
        table = pl.DataFrame({"record_id": [0, 1, 2], "action": np.array([-3.0, 0.5, 1.5], np.float32)})
        for squashed, actions in ((False, [-2.0, 0.5, 1.0]), (True, [-5.0, 0.25, 1.75])):
            config = {"action_space": space, "policy_kwargs": {"squash_output": squashed}}
            run = RunDirectory.create(tmp_path / str(squashed), config)
            run.write_round("records", 1, table)
            assert ExploredRun(run).round(1).table["action"].to_list() == actions

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        odd = np.array([np.nan, np.inf, -np.inf] * 20, dtype=np.float32)
        run = run_of(tmp_path / "lake", table_of(score=odd, value=odd, advantage=odd, error=odd, reward=odd))
        shown = plain(build_round(run, 1, rows=True))
        assert set(shown["strip"]["scores"]) == {None}
        plain(build_detail(run, 1, 4))
        plain(query_records(run, 1))

    def test_a_large_round_shows_the_episodes_of_its_moments(self, monkeypatch):
        monkeypatch.setattr("whence.page.content.rounds.STRIP", 20)
        table = table_of()
        moments = find_moments(table, lowest=True, most=1)
        assert set(order_strip(table, moments)["episode_id"]) == {moments[0].episode_id}


def test_groups_are_in_their_own_order(lake):
    steps = ["step 0–1", "step 2–3", "step 4–5", "step 6–7", "step 8–9"]
    pivot = plain(build_pivot(lake, 1, ["step"]))
    assert (pivot["rows"], pivot["columns"]) == (steps, None)
    assert sorted(cell[:3] for cell in pivot["cells"]) == [[place, 0, 12] for place in range(5)]
    across = plain(build_pivot(lake, 1, ["keep", "step"]))
    assert (across["rows"], across["columns"]) == (["dropped", "trained"], steps)


class TestQuery:
    def ids(self, run, page=1, size=50, **search):
        return [row["record_id"] for row in query_records(run, 1, Search(**search), page=page, size=size)["data"]]

    def test_pages_in_order(self, lake):
        order = table_of().sort("score", "record_id")["record_id"].to_list()
        assert self.ids(lake, size=25) == order[:25]
        assert self.ids(lake, size=25, page=3) == order[50:]
        assert self.ids(lake, size=25, page=4) == []
        answer = plain(query_records(lake, 1, size=25))
        assert (answer["last_page"], answer["last_row"]) == (3, 60)

    def test_sorted_by_another_column(self, lake):
        assert self.ids(lake, sort="record_id", descending=True, size=3) == [59, 58, 57]
        assert self.ids(lake, sort="reason", size=2) == table_of().filter(~pl.col("keep"))["record_id"].to_list()[:2]
        assert len(self.ids(lake, sort="observation")) == 50

    def test_actions_are_sorted_as_numbers_unless_they_have_names(self, tmp_path, monkeypatch):
        run = run_of(tmp_path / "many", table_of(action=[2, 10, 1] * 20))
        assert [row["action"] for row in query_records(run, 1, Search(sort="action"))["data"]][::20] == ["1", "2", "10"]
        monkeypatch.setattr(ExploredRun, "labels", [f"{'cba'[k % 3]}{k}" for k in range(11)])
        assert [row["action"] for row in query_records(run, 1, Search(sort="action"))["data"]][::20] == [
            "a2",
            "b1",
            "b10",
        ]

    @pytest.mark.parametrize(
        ("filters", "expected"),
        [
            ([("score", "<-28")], pl.col("score") < -28),
            ([("score", ">= 27"), ("action", "1")], (pl.col("score") >= 27) & (pl.col("action") == 1)),
            ([("step", "3")], pl.col("step") == 3),
            ([("keep", "dropped")], ~pl.col("keep")),
            ([("keep", "kept")], pl.col("keep")),
            ([("reason", "TOO")], ~pl.col("keep")),
            ([("value", "0.14")], pl.col("record_id") == 1),
            ([("observation", "-59.0")], pl.col("record_id") == 59),
            ([("value", "1e999")], pl.lit(False)),
            ([("value", "<1e999"), ("step", "3")], pl.col("step") == 3),
        ],
    )
    def test_filters(self, lake, filters, expected):
        wanted = table_of().filter(expected)["record_id"].to_list()
        assert sorted(self.ids(lake, filters=filters)) == sorted(wanted)

    def test_search(self, lake):
        assert {59} <= set(self.ids(lake, search="59"))
        assert len(self.ids(lake, search="too LOW")) == (~table_of()["keep"]).sum()

    @pytest.mark.parametrize(
        "query",
        [{"sort": "nope"}, {"page": 0}, {"size": 501}, {"filters": [("score", "many")]}, {"filters": [("keep", "x")]}],
    )
    def test_questions_without_a_meaning_are_refused(self, lake, query):
        with pytest.raises(WhenceError):
            self.ids(lake, **query)

    def test_labels_are_searched_for_and_shown(self, lake, monkeypatch):
        monkeypatch.setattr(ExploredRun, "labels", ["nothing", "left", "main", "right"])
        shown = query_records(lake, 1, Search(filters=[("action", "MAI")]))["data"]
        assert {row["action"] for row in shown} == {"main"}
        assert len(shown) == 15


class TestSearchOfAllRounds:
    @pytest.fixture
    def run(self, tmp_path):
        """Of three rounds of sixty records: the scores of the second are twice the first's, the third has none."""
        run, ids = run_of(tmp_path / "long"), np.arange(60)
        doubled = table_of(record_id=60 + ids, score=2 * table_of()["score"].to_numpy())
        run.directory.write_round("records", 2, doubled)
        run.directory.write_round("records", 3, table_of(record_id=120 + ids, score=None, error=None))
        return run

    def places(self, run, **search):
        answer = plain(query_records(run, None, Search(**search)))
        return [(row["round"], row["record_id"]) for row in answer["data"]], answer["last_row"], answer["left_out"]

    def test_they_come_in_order_of_rounds_and_none_is_scored(self, run, monkeypatch):
        scored = []
        monkeypatch.setattr(
            "whence.page.content.explored_run.score_round", lambda *args, **settings: scored.append(args)
        )
        places, count, left_out = self.places(run)
        assert places == [(1, number) for number in range(50)]
        assert (count, left_out, scored) == (180, [], [])
        answer = query_records(run, None, page=4, size=50)
        assert [row["record_id"] for row in answer["data"]] == list(range(150, 180))
        assert (answer["records"], answer["last_page"]) == (180, 4)

    def test_by_conditions_as_in_a_round(self, run):
        places, count, left_out = self.places(run, filters=[("score", "<-28")], sort="score")
        # The scores of the first two rounds are -30, -29, ... and -60, -58, ...
        first, second = [(1, record) for record in (0, 43)], [(2, 60 + k * 43 % 60) for k in range(16)]
        assert places == [*second[:15], first[0], second[15], first[1]]
        assert (count, left_out) == (18, [3])
        assert self.places(run, search="too low")[1] == 45
        assert self.places(run, filters=[("round", ">1"), ("step", "3")])[1] == 12
        assert self.places(run, ids=[3, 63])[0] == [(1, 3), (2, 63)]

    def test_by_a_condition_in_sql(self, run):
        assert self.places(run, where="action = 2 and step < 1 and round > 1")[0] == [
            *((2, 70), (2, 90), (2, 110), (3, 130), (3, 150), (3, 170))
        ]
        assert self.places(run, where="score < -59")[1:] == (1, [3])
        assert self.places(run, where="x1 < -58")[1] == 3
        for where in ("nope > 1", "1; drop", "(select 1)"):
            with pytest.raises(WhenceError, match=r"where is .*Write a condition in SQL"):
                self.places(run, where=where)

    def test_what_no_round_has_is_refused(self, run):
        with pytest.raises(WhenceError, match="no column 'fuel'"):
            self.places(run, filters=[("fuel", "1")])

    def test_a_record_that_is_there_twice_is_listed_twice(self, run):
        twice = pl.concat([table_of(), table_of()[:1]])
        run.directory.write_round("records", 1, twice)
        assert self.places(run, ids=[0])[0] == [(1, 0), (1, 0)]


class TestDetail:
    def test_what_surrounds_a_record(self, lake):
        detail = plain(build_detail(lake, 1, 13))
        assert (detail["episode"], detail["step"], detail["action"]) == (1, 3, "1")
        window = detail["window"]
        assert window["record_ids"] == list(range(10, 20))
        assert window["steps"] == list(range(10))
        assert {len(values) for values in window.values()} == {10}
        assert [entry["value"] for entry in detail["state"]] == [13.0, -13.0]
        assert detail["targets"][0]["significant"] is is_significant(detail["targets"][0]["score"], 10.0)
        # Its environment is not there.
        assert detail["frames"] is None
        assert detail["frames_note"].startswith("No frames: ")
        assert detail["mc_advantage"] is None

    def test_its_facts_in_words(self, lake):
        view = gather_moment(lake, 1, find_moment(lake.round(1).table, 17))
        assert view.facts == {
            "score": "29 ± 10, training on it raises the target",
            "moment": "steps 5 to 7: 3 records, total 66, 0 dropped",
            **{"trained": "yes", "action": "1", "advantage": "2.43", "value": "2.43", "return": "2.43", "reward": "1"},
        }
        dropped = gather_moment(lake, 1, find_moment(lake.round(1).table, 0), rollouts=2)
        assert dropped.facts["moment"] == "steps 0 to 2: 3 records, total -69, 3 dropped"
        assert dropped.facts["trained"] == "no, dropped: too low"
        assert dropped.facts["fresh rollouts"].startswith("Not measured by fresh rollouts: ")


def make_replay(steps, mismatch=None, frames_note=None):
    """Return a replay with a frame for each of its steps."""
    frames = {step: np.full((40, 600, 3), step, dtype=np.uint8) for step in steps}
    ids, numbers = np.arange(len(frames)), np.zeros(len(frames))
    return EpisodeReplay(0, ids, [], numbers, numbers, frames, mismatch, frames_note)


class TestFrames:
    def test_frames_are_small_pictures(self):
        frame = np.random.default_rng(0).integers(0, 255, (400, 600, 3), dtype=np.uint8)
        encoded = encode_frames({7: frame}, 7)
        assert (encoded["width"], encoded["height"], encoded["face"]) == (WIDTH, 160, 0)
        data = base64.b64decode(encoded["images"][0].removeprefix("data:image/webp;base64,"))
        assert Image.open(io.BytesIO(data)).size == (WIDTH, 160)

    @pytest.mark.parametrize(("frames", "last"), [(4, False), (1, False), (4, True), (1, True)])
    def test_the_thumbnail_of_a_picture_is_its_stored_observation(self, tmp_path, frames, last):
        """Pictures of 6 by 8 pixels, frames first or last; the latest is bright where the record's number says."""
        latest = np.zeros((60, 6, 8), np.uint8)
        latest[np.arange(60), np.arange(60) % 6, np.arange(60) % 8] = 100
        images = np.stack([0 * latest] * (frames - 1) + [latest], axis=3 if last else 1)
        space = {"type": "Box", "shape": [*images.shape[1:]], "low": "0", "high": "255", "dtype": "uint8"}
        table = table_of(observation=images.reshape(60, -1))
        run = run_of(tmp_path / "images", table, {"env": None, "observation_space": space})
        worst = build_round(run, 1)["worst"][0]
        data = base64.b64decode(worst["thumb"].removeprefix("data:image/webp;base64,"))
        picture = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
        assert (picture == latest[worst["record"]]).all()
        shown = build_detail(run, 1, worst["record"])["frames"]
        assert (shown["steps"], shown["width"]) == ([worst["step"]], 8)
        assert build_round(run_of(tmp_path / "numbers"), 1)["worst"][0]["thumb"] is None

    def test_an_episode_is_read_from_its_own_rounds(self, tmp_path, monkeypatch):
        """Of forty rounds with an episode each, and one that holds the end of the one before."""
        run = run_of(tmp_path / "lake", rounds=()).directory
        for number in range(1, 41):
            begun = [] if number == 31 else [number]
            ids, at = np.full(10, 30 if number == 31 else number), 10 if number == 31 else 0
            end = [None] * 9 + [None if number == 30 else "terminated"]
            run.write_round("records", number, table_of(10, episode_id=ids, step=np.arange(10) + at, end=end))
            states = pl.Series([json.dumps({"seed": number})] * len(begun), dtype=pl.String)
            episodes = pl.DataFrame({"episode_id": begun, "env_index": [0] * len(begun)}).with_columns(
                pl.col("episode_id", "env_index").cast(pl.Int64), generator_state=states
            )
            run.write_round("episodes", number, episodes)
        read, read_round = [], RunDirectory.round
        monkeypatch.setattr(RunDirectory, "round", lambda *place: (read.append(place[1:]), read_round(*place))[1])
        for episode, rounds in ((39, [39]), (30, [30, 31]), (1, [1]), (40, [40])):
            read.clear()
            stored = read_episode(run, episode)
            assert stored.generator_state == {"seed": episode}
            assert stored.records["step"].to_list() == list(range(10 * len(rounds)))
            assert [number for name, number in read if name == "records"] == rounds
            assert len(read) <= 10

    def test_each_episode_is_replayed_once_for_all_its_moments(self, tmp_path, monkeypatch):
        scores = np.zeros(60, dtype=np.float32)
        scores[[11, 14, 17]] = -1
        scores[[31, 34, 37]] = 1
        scores[51] = -0.5
        lake = run_of(tmp_path / "lake", table_of(score=scores))
        asked = []

        def replay(run, episode, *, env, frames, last_step):
            asked.append((episode, sorted(frames)))
            return make_replay(frames)

        monkeypatch.setattr("whence.page.content.explored_run.replay_episode", replay)
        ((_, embedded),) = embed_rounds([lake], [[1]])
        assert [episode for episode, _ in asked] == [1, 3]
        content = json.loads(gzip.decompress(base64.b64decode(embedded)))
        framed = [moment for end in ("worst", "best") for moment in content["round"][end] if moment["thumb"]]
        assert [moment["record"] for moment in framed] == [11, 31]
        for moment in framed:
            frames = content["details"][str(moment["record"])]["frames"]
            assert frames["steps"][frames["face"]] == moment["step"]
            assert len(frames["images"]) == len(frames["steps"])
            assert moment["thumb"].startswith("data:image/webp;base64,")
        unframed = [d for d in content["details"].values() if d["frames"] is None]
        assert {d["frames_note"] for d in unframed} == {NOT_EMBEDDED}

    @pytest.mark.parametrize(
        ("step", "drawn", "mismatch", "frames_note", "expected"),
        [
            (3, [0, 1, 2], "Step 3 differs.", None, ([], "Step 3 differs.")),
            (2, [0, 1, 2], "Step 3 differs.", None, ([1, 2], "Step 3 differs.")),
            (3, [], None, "It has no render mode.", ([], "It has no render mode.")),
            (3, [], None, None, ([], "The replay ended before this step.")),
        ],
    )
    def test_what_is_missing_of_frames_is_said(self, lake, monkeypatch, step, drawn, mismatch, frames_note, expected):
        replay = make_replay(drawn, mismatch, frames_note)
        monkeypatch.setattr("whence.page.content.explored_run.replay_episode", lambda *_, **__: replay)
        ((frames, note),) = replay_moments(lake, [(find_moment(table_of(), step), [1, 2, 3])]).values()
        assert (list(frames), note) == expected


def test_the_share_beyond_two_errors(lake):
    share = (table_of()["score"].abs() > 20).mean()
    (line,) = describe_trust(lake, table_of())
    assert line["level"] == "unknown"  # the share is no verdict
    assert line["text"].startswith(f"{share:.0%} of the scores are beyond two of their errors")
    assert "without standard errors" in describe_trust(lake, table_of(error=None))[0]["text"]


def test_a_damaged_round_has_a_note(tmp_path):
    run = run_of(tmp_path / "lake", rounds=(1, 2))
    file = tmp_path / "lake" / "records" / "round_00002.parquet"
    file.write_bytes(file.read_bytes()[:-200])
    assert build_round(run, 1)["notes"] != build_round(run, 2, rows=True)["notes"]
    assert "cannot be read as Parquet" in build_round(run, 2)["notes"][0]
    assert describe_runs([run])["runs"][0]["columns"][0]["key"] == "record_id"
