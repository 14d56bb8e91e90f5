"""The suite of what scoring costs: its cells, resuming, estimates, other libraries' scores, and the tables."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import whence
from studies.benchmarks import engines as suite_engines
from studies.benchmarks import grpo as suite_grpo
from studies.benchmarks import libraries as peers
from studies.benchmarks import peers as suite_peers
from studies.benchmarks import policies as suite_policies
from studies.benchmarks import run as suite
from studies.benchmarks import tables as suite_tables
from studies.benchmarks import timing as suite_timing
from studies.benchmarks.cells import Cell, Setting, choose, read_results, results_file
from whence.errors import WhenceError

TINY = "width-8"
"""A policy with 64 records, which the suite does not measure."""

SAME = [name for name, peer in peers.PEERS.items() if not peer.note or peer.layers or name == "kronfluence"]
"""The peers whose scores are whence's, or those of a policy's linear layers, which are all that the tiny one has."""


@pytest.fixture(scope="module")
def subject():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suite_policies.RL, TINY, 64)
        yield suite_policies.make_subject(TINY, "cpu")


def engine_line(seconds, records, **more):
    """What a cell of scoring holds."""
    about = {"machine": "m", "torch": "t", "section": "engines", "records": records, "parameters": 9}
    spread = {"low": seconds / 2, "high": 2 * seconds, "turns": 3}
    columns = {"seconds": {"median": seconds, **spread}, "plain": {"median": 1.0, "turns": 1}}
    return about | columns | {"ratio": {"median": seconds, **spread}, "record_bytes": 8, "budget": 2**28} | more


class TestCells:
    def test_every_engine_policy_and_size_is_a_cell_once(self):
        cells = suite.list_cells()
        names = [cell.name for cell in cells]
        assert len(names) == len(set(names))
        assert {cell.section for cell in cells} == {"engines", "training", "peers", "rounds", "install"}
        for policy in ("mlp", "minigrid", "nature"):
            for engine in ("loop", "vmap", "forward", "ghost"):
                assert {f"{policy}/{engine}/{size}" for size in (512, 2048, 16384, 131072, 1000000)} <= set(names)
        for size in ("1M", "10M", "100M"):
            assert {f"gpt-{size}{kind}/ghost/{rows}" for kind in ("", "-lora") for rows in (16, 64, 256)} <= set(names)
        assert {"rounds/grpo", *(f"rounds/grpo-kept/{share}" for share in ("1", "0.5", "0.25"))} <= set(names)
        assert {f"peers/{policy}/{peer}" for policy in ("mlp", "gpt-1M") for peer in peers.PEERS} <= set(names)

    def test_models_of_the_names_can_be_made(self):
        shapes = (Path(suite.__file__).parent / "cheap_scores.py").read_text(encoding="utf-8")  # imports for seconds
        assert {name.split("-")[1] for name in suite_policies.LANGUAGE} == set(re.findall(r'"(\d+M)": \(', shapes))

    def test_a_cell_brings_the_smaller_ones_of_its_row(self):
        cells = suite.list_cells()
        assert [cell.name for cell in choose(cells, "mlp/ghost/16384")] == [
            f"mlp/ghost/{size}" for size in (512, 2048, 16384)
        ]
        assert [cell.name for cell in choose(cells, "install/example, peers/mlp/opac*")] == [
            "peers/mlp/opacus",
            "install/example",
        ]
        assert {cell.section for cell in choose(cells, "rounds")} == {"rounds"}
        assert {cell.name.split("/")[0] for cell in choose(cells, "mlp")} == {"mlp"}
        assert choose(cells, None) == cells

    def test_a_name_that_is_no_cell_is_refused(self):
        with pytest.raises(WhenceError, match=r"--only names 'mlp/gost/2048', which is no cell\. .*mlp/ghost/2048.*"):
            choose(suite.list_cells(), "mlp/gost/2048")


class TestRuns:
    def test_a_finished_cell_is_not_measured_again(self, tmp_path, capsys):
        calls = []

        def measure(setting):
            calls.append(dict(setting.results))
            if len(calls) == 2:
                raise KeyboardInterrupt
            return {"seconds": {"median": 1.0}, "estimated": "time"}

        cells = [Cell(name, "engines", measure) for name in ("one", "two")]
        with pytest.raises(KeyboardInterrupt):
            suite.measure(tmp_path, cells, "cpu", 1)
        assert [json.loads(line)["cell"] for line in results_file(tmp_path).read_text().splitlines()] == ["one"]
        suite.measure(tmp_path, cells, "cpu", 1)
        suite.measure(tmp_path, cells, "cpu", 1)
        assert len(calls) == 3
        assert list(calls[2]) == ["one"]  # it sees what others result
        assert list(read_results(tmp_path)["cpu"]) == ["one", "two"]
        assert "[1/2] one: ~1 s" in capsys.readouterr().out

    def test_a_peer_that_is_not_installed_is_skipped_with_the_remedy(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(suite_peers, "make_subject", lambda *_: pytest.fail("it was measured"))
        suite.measure(tmp_path, choose(suite.list_cells(), "peers/mlp/opacus"), "cpu", 1)
        assert "not installed: make peers (opacus)" in capsys.readouterr().out
        assert read_results(tmp_path) == {}  # it is measured when it is installed

    def test_a_device_that_is_not_there_is_an_error_that_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SystemExit, match="--device is 'cuda', but there is no GPU here"):
            suite.main(tmp_path / "out", device="cuda", only=None, repeats=1, show=False)
        assert not (tmp_path / "out").exists()
        with pytest.raises(WhenceError, match="'gpu', which torch does not know"):
            suite_timing.check_device("gpu")
        makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
        first = makefile[makefile.index("\ngpu:") :].splitlines()[2]
        assert first == "\t$(BIN)/python -m studies.benchmarks.run --device cuda --list > /dev/null"


class TestEngines:
    def test_a_row_is_scored_and_its_memory_counted(self, subject):
        result = suite_engines.measure_engine(TINY, "ghost", 64, Setting("cpu", 2))
        assert result["seconds"]["turns"] == result["ratio"]["turns"] == 2
        assert 0 < result["seconds"]["low"] <= result["seconds"]["median"] <= result["seconds"]["high"]
        assert 0 < result["peak"]["tensors"] < result["budget"]
        assert result["parameters"] == subject.parameters

    def test_more_records_than_were_collected_repeat_them(self, subject):
        few, many = subject.records(64), subject.records(150)
        assert len(many) == 150
        assert torch.equal(many.observations[64:128], few.observations)
        assert torch.equal(many.actions[128:], few.actions[:22])
        assert len(set(many.ids.tolist())) == 150

    def test_the_pieces_of_a_plain_pass_add_up_to_all_records(self, subject):
        sizes = []
        counting = replace(subject, plain=lambda piece: sizes.append(len(piece)), chunk=40)
        suite_engines.make_plain_pass(counting, subject.records(100))()
        assert sizes == [40, 40, 20]

    def test_what_would_take_too_long_is_estimated_in_proportion(self, monkeypatch):
        monkeypatch.setattr(suite_engines, "make_subject", lambda *_: pytest.fail("it was measured"))
        results = {"mlp/loop/512": engine_line(4.0, 512), "mlp/loop/2048": engine_line(20.0, 2048)}
        result = suite_engines.measure_engine("mlp", "loop", 16384, Setting("cpu", 1, results))
        assert (result["estimated"], result["estimated_from"]) == ("time", [512, 2048])
        assert result["seconds"]["median"] == pytest.approx(160)
        assert result["plain"]["median"] == pytest.approx(8)
        results["mlp/loop/16384"] = result
        further = suite_engines.measure_engine("mlp", "loop", 131072, Setting("cpu", 1, results))
        assert further["estimated_from"] == [512, 2048]  # not from an estimate
        assert further["seconds"]["median"] == pytest.approx(1280)

    def test_what_does_not_fit_into_memory_is_estimated(self, monkeypatch):
        monkeypatch.setattr(suite_engines, "find_free_memory", lambda device: 2**30)
        monkeypatch.setattr(suite_engines, "make_subject", lambda *_: pytest.fail("it was measured"))
        results = {"mlp/ghost/512": engine_line(1e-3, 512, record_bytes=2**20)}
        assert suite_engines.measure_engine("mlp", "ghost", 2048, Setting("cpu", 1, results))["estimated"] == "memory"

    def test_an_engine_that_refused_fewer_records_is_not_asked_again(self, monkeypatch):
        monkeypatch.setattr(suite_engines, "make_subject", lambda *_: pytest.fail("it was asked"))
        results = {"mlp/vmap/512": {"records": 512, "refused": "no rule"}}
        result = suite_engines.measure_engine("mlp", "vmap", 2048, Setting("cpu", 1, results))
        assert result == {"records": 2048, "refused": "no rule"}

    def test_growth_by_hand(self):
        assert suite_timing.fit_exponent([1, 10, 100], [2, 20, 200]) == pytest.approx(1)
        assert suite_timing.predict([10], [3.0], 40) == pytest.approx(12)
        assert suite_timing.predict([1, 10, 20], [9.0, 2.0, 8.0], 40) == pytest.approx(
            16
        )  # of the last, whatever the growth

    def test_a_long_first_turn_is_the_only_one(self, monkeypatch):
        seconds = iter([4.0, 3.0])
        monkeypatch.setattr(suite_timing, "time_once", lambda run, device: next(seconds))
        assert suite_timing.take_turns([None, None], repeats=5, device="cpu") == [[4.0, 3.0]]


class TestKeptRows:
    """Steps that neither draw nor score, on a share of the completions."""

    def test_steps_that_draw_and_the_first_round_do_not_count(self, monkeypatch):
        settings = {}

        def train(rules, setting, **arguments):
            settings.update(arguments)
            one_round = [100.0, *[1.0] * (suite_grpo.ITERATIONS - 1)]  # its first step draws
            rounds = [*[50.0] * suite_grpo.ITERATIONS, *one_round * 2]
            return {
                name: [[{"round": seconds * (0.5 if rule else 1.0), "scoring": 0.0} for seconds in rounds]] * 2
                for name, rule in rules.items()
            }

        monkeypatch.setattr(suite_grpo, "train_in_turns", train)
        result = suite_grpo.measure_kept(0.5, Setting("cpu", 3))
        assert settings == {"num_iterations": suite_grpo.ITERATIONS, "max_steps": 3 * suite_grpo.ITERATIONS}
        assert result["stages"]["TRL"]["round"]["high"] == 1.0
        assert result["stages"]["whence, 50% kept"]["round"]["high"] == 0.5
        assert result["ratio"]["low"] == result["ratio"]["high"] == 0.5

    def test_the_first_completions_are_kept(self):
        selection = suite_grpo.KeepFirst(0.25).select(range(8), None, None)
        assert selection.keep.tolist() == [True] * 2 + [False] * 6


class TestPeers:
    @pytest.mark.parametrize("name", SAME)
    def test_a_peers_scores_are_those_of_whence(self, name, subject):
        peer = peers.PEERS[name]
        if not peers.is_installed(peer):
            pytest.skip(f"{peer.module} is not installed")
        truth = whence.attribute(
            subject.policy, subject.records(64), layers=peer.layers and [peer.layers], **subject.scoring
        )
        with suite_peers.silence():
            scores = peer.run(subject.question(64))
        assert suite_peers.measure_difference(scores.double(), truth.scores.double()) < 1e-5

    def test_a_peer_and_whence_take_turns(self, subject):
        result = suite_peers.compare(peers.PEERS["torch-vmap"], subject, 64, Setting("cpu", 1))
        assert result["difference"] < 1e-5
        assert result["spearman"] == pytest.approx(1)
        assert result["ratio"]["median"] == pytest.approx(result["seconds"]["median"] / result["whence"]["median"])

    def test_a_peer_that_cannot_express_it_says_why(self, subject, monkeypatch):
        def fail(question):
            raise ValueError("policies of two actions alone\nand so on")

        monkeypatch.setitem(peers.PEERS, "none", peers.Peer(fail, note="other"))
        monkeypatch.setattr(suite_peers, "make_subject", lambda *_: subject)
        result = suite_peers.measure_peer("mlp", "none", 64, Setting("cpu", 1))
        assert result == {"records": 64, "note": "other", "refused": "ValueError: policies of two actions alone"}

    def test_an_assertion_without_words_is_told_by_its_line(self, tmp_path):
        peer = tmp_path / "peer.py"  # a file of its own: pytest gives words to the assertions of this one
        peer.write_text("assert ()\n", encoding="utf-8")
        with pytest.raises(AssertionError) as failure:
            runpy.run_path(str(peer))
        assert suite_peers.describe_failure(failure.value) == "AssertionError: assert ()"

    def test_a_peer_whose_gradients_do_not_fit_into_memory_is_estimated(self, subject, monkeypatch):
        few = 4 * 4 * 16 * subject.parameters  # one batch's
        monkeypatch.setattr(suite_peers, "find_free_memory", lambda device: few)
        monkeypatch.setattr(suite_peers, "batch_size", lambda question: 16)
        setting = Setting("cpu", 1)
        assert suite_peers.compare(peers.PEERS["matrix-vmap"], subject, 64, setting)["estimated"] == "memory"
        assert "estimated" not in suite_peers.compare(peers.PEERS["torch-vmap"], subject, 64, setting)

    def test_a_slow_peer_is_estimated_with_the_part_that_does_not_grow(self):
        assert suite_peers.predict_peer(lambda n: 10 + 0.5 * n, 64) == pytest.approx(42)


def make_results():
    """A line of each kind."""
    cells = {
        f"mlp/ghost/{n}": engine_line(n / 1e4, n, peak={"tensors": peak, "grown": 2 * peak})
        for n, peak in ((512, 2**20), (2048, 2**22), (131072, 2**25))
    }
    cells["mlp/ghost/1000000"] = engine_line(90.0, 10**6, estimated="time")
    cells["mlp/vmap/512"] = {"section": "engines", "records": 512, "refused": "no | rule", "machine": "m", "torch": "t"}
    peak = {"tensors": 2**20, "grown": 2**21}
    peer = {**engine_line(3.0, 2048), "section": "peers", "note": "", "difference": 2e-7, "spearman": 1.0}
    peer |= {"peak": peak, "whence_peak": None}
    cells["peers/mlp/opacus"] = peer
    cells["peers/mlp/trak"] = peer | {"estimated": "time", "note": "projected"}
    cells["peers/mlp/captum-fast"] = peer | {"difference_of_layers": 1e-7, "note": "the last layer"}
    one = {"median": 1.0, "low": 0.5, "high": 2.0, "turns": 3}
    training = {**engine_line(1.0, 2048), "section": "training", "share": one, "memory": 0.9, "ten_targets": one}
    cells["training/mlp/ghost"] = training
    stages = {"PPO": {"round": one}, "PPO + IIF": {"round": one, "scoring": one}}
    cells["rounds/minigrid"] = {**engine_line(1.0, 2048), "section": "rounds", "stages": stages, "share": one}
    cells["install/example"] = {**engine_line(9.0, 1), "section": "install", "stages": {"install": 9.0}}
    return {"cpu": cells}


class TestTables:
    def test_each_table_names_commands_that_exist(self):
        page = suite_tables.make_page(make_results())
        cells = suite.list_cells()
        commands = re.findall(r"`--only ([^`A-Z]+)`", page)
        assert set(commands) == set(make_results()["cpu"])
        for command in commands:
            assert choose(cells, command)[-1].name == command
        rows = re.findall(r"^\| `([\w./-]+)` \|", page, flags=re.MULTILINE)
        assert {"mlp/ghost", "mlp/vmap"} == set(rows)
        assert all(choose(cells, row) for row in rows)

    def test_an_estimate_is_marked_and_takes_no_part_in_a_growth(self):
        results = make_results()
        page = suite_tables.make_page(results)
        assert "51.2 ms, 0.05× | 205 ms, 0.20× | – | 13.1 s, 13.11× | ~90 s, ~90.00× |" in page
        assert "| `--only mlp/ghost/1000000` | 1,000,000 | ~90 s [45 s, 180 s] |" in page
        growth = suite_tables.fit_growth(results["cpu"])["mlp/ghost, records"]
        assert (growth["sizes"], growth["exponent"]) == ([2048, 131072], pytest.approx(1))
        assert "| `--only peers/mlp/trak` | 2,048 | ~3 s" in page
        assert "no: no / rule" in page

    def test_memory_is_flat_where_it_grows_by_less_than_a_twentieth(self):
        peaks = suite_tables.find_peaks(make_results()["cpu"])["mlp/ghost"]
        result = suite_tables.compare_peaks(peaks)
        assert result["changes"] == {2048: 7.0}
        assert suite_tables.compare_peaks(peaks[:2])["changes"] == {512: 3.0}
        assert result["within"]
        assert suite_tables.show_change(0.04) == "yes, +4%"
        assert suite_tables.show_change(-0.06) == "no, −6%"
        assert suite_tables.show_change(7.0) == "no, 8 times"
        low = [line | {"budget": 2**20} for line in peaks]
        assert not suite_tables.compare_peaks(low)["within"]

    def test_files_are_written_and_an_empty_directory_is_refused(self, tmp_path):
        with pytest.raises(SystemExit, match=r"has no cells\. Run first: python -m studies\.benchmarks\.run"):
            suite_tables.main(tmp_path)
        suite.measure(tmp_path, [Cell("mlp/ghost/512", "engines", lambda _: engine_line(1.0, 512))], "cpu", 1)
        suite_tables.main(tmp_path)
        assert json.loads((tmp_path / "summary.json").read_text())["cpu"]["cells"]["mlp/ghost/512"]["records"] == 512
        assert "### Scoring by the number of records" in (tmp_path / "tables.md").read_text()
