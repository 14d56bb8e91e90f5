import contextlib
import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from importlib.metadata import entry_points

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.launching import run_one_by_one
from whence import cli
from whence.cli.terminal import PlannedBars, progress
from whence.lab import Planned
from whence.lab.agents import RunConfig
from whence.lab.arms import ARMS, read_presets
from whence.lab.tables import METRICS, READING, cell
from whence.runs import RunDirectory

# Two runs one after the other.
LAKE = ["FrozenLake-v1", "--arms", "ppo,iif", "--seeds", "1", "--rounds", "2", "--eval-episodes", "4", "--workers", "1"]
LAKE += ["--n-steps", "64"]


SET = {each.name for each in fields(RunConfig)} - {"env", "arm", "seed", "hyperparameters", "target_args"}


def words(text):
    """The text without frames and line breaks, which depend on the terminal's width."""
    return " ".join(text.translate({ord(char): " " for char in "│╭╮╰╯─┃┏┓┡┩┳╇━└┘┴"}).split())


def stamps(path):
    files = [file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", ".signature")]
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in files}


def start(*arguments):
    """Start the command in a process group of its own."""
    # A test run in the background may have been started with Ctrl-C ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "whence.cli", *map(str, arguments)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True},
            env=os.environ | {"COLUMNS": "200"},
        )
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(process):
    """Wait for the end of a process and all its children; returns exit code, stdout and stderr."""
    try:
        # The children hold the same pipes: this returns when the last of them has gone.
        out, err = process.communicate(timeout=120)
        return process.returncode, words(out), words(err)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class TestHelp:
    def test_commands(self):
        for arguments in (["--help"], []):
            assert "compare Train each arm on each seed" in words(CliRunner().invoke(cli.app, arguments).output)

    def test_options_are_the_configurations_fields_with_their_defaults(self):
        text = words(CliRunner().invoke(cli.app, ["compare", "--help"]).output)
        assert f"{', '.join(ARMS)}; whence list arms tells what they do." in text
        for name in (
            *read_presets(),
            *(f"--{each.name.replace('_', '-')}" for each in fields(RunConfig) if each.name in SET),
        ):
            assert name in text
        for about in (
            *("Rollouts to train on. (default: 50)", "below 0. (default: 0.125)", "0: no evaluation. (default: 100)"),
            *("side by side. (default: 1)", "Step size. (default: 0.0003)", "observed. (default: all of it)"),
            *("Runs at a time. (default: one per core)", "[default: ppo,iif,random]", "[default: out/compare]"),
        ):
            assert about in text

    def test_whence_is_this_command(self):
        (script,) = entry_points(group="console_scripts", name="whence")
        assert script.load() is cli.main


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("compare") / "lake"


def stop(out, arm, sent):
    """Send the command a signal in the run of an arm; returns what `wait_for` does."""
    process = start("compare", *LAKE, "--n-steps", "512", "--out", out)  # each run then takes a second
    try:
        until = time.monotonic() + 120
        while not (out / "runs" / arm / "seed_0" / "evaluations.parquet").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(sent)
    finally:
        result = wait_for(process)
    return result


@pytest.fixture(scope="module")
def interrupted(out):
    """Interrupt the command in its second run; returns what `wait_for` does, and the files there then."""

    def interrupt_second(jobs, workers, on_round):
        def report(place, rounds):
            on_round(place, rounds)
            if (place, rounds) == (1, 1):
                raise KeyboardInterrupt

        return run_one_by_one(jobs, workers, report)

    return *compare_here(out, interrupt_second), stamps(out)


def compare_here(out, run_all):
    """Give the command in this process, which makes its runs; returns what `wait_for` does."""
    text, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text), redirect_stderr(err):
        patch.setattr(sys, "argv", ["whence", "compare", *LAKE, "--out", str(out)])
        patch.setattr("whence.lab.cluster.run_all", run_all)
        with pytest.raises(SystemExit) as end:
            cli.main()
    return end.value.code, words(text.getvalue()), words(err.getvalue())


@pytest.fixture(scope="module")
def finished(out, interrupted):
    """Give the same command again, which makes the second run."""
    return compare_here(out, run_one_by_one)


class TestCompare:
    def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(self, out, interrupted, finished):
        code, text, err, files = interrupted
        assert (code, text) == (130, "")
        assert err.endswith("Interrupted. What was finished is kept; the same command goes on from there.")
        assert "Traceback" not in err
        assert "runs/ppo/seed_0/policies/round_00003.safetensors" in files
        assert "runs/iif/seed_0/policies/round_00003.safetensors" not in files
        assert "summary.json" not in files
        code, _, err = finished
        assert code == 0
        for arm in ("ppo", "iif"):
            assert f"{arm}, seed 0: 2 rounds done" in err
        now = stamps(out)
        assert {name: stamp for name, stamp in files.items() if name.startswith("runs/ppo/")}.items() <= now.items()
        assert {"comparison.json", "summary.json", "report.html"} <= now.keys()
        assert "runs/iif/seed_0/policies/round_00003.safetensors" in now

    def test_it_prints_the_table_and_writes_the_page(self, out, finished):
        _, text, _ = finished
        (summary,) = json.loads((out / "summary.json").read_text(encoding="utf-8")).values()
        final = [summary[arm]["final_return"]["mean"] for arm in ("iif", "ppo")]
        verdict = "Too few seeds to compare iif with ppo: iif ends at {:.3g} and ppo at {:.3g}."
        assert text.startswith(f"{verdict.format(*final)} FrozenLake-v1, 1 seeds, 2 rounds metric ppo (null) iif")
        assert "divergence (KL)" in text
        for metric, heading in METRICS.items():
            numbers = " ".join(" ".join(cell(metric, summary[arm][metric])) for arm in ("ppo", "iif"))
            assert words(f"{heading} {numbers}") in text
        assert words(READING) in text
        assert f"Numbers: {out / 'summary.json'}" in text
        assert f"Page: {out / 'report.html'}" in text
        page = (out / "report.html").read_text(encoding="utf-8")
        assert "<h1><bdi>FrozenLake-v1: ppo, iif</bdi></h1>" in page

    def test_a_finished_comparison_is_told_again_without_training(self, whence, out, finished):
        before = stamps(out / "runs")
        code, text, err = whence("compare", *LAKE, "--out", out, "--json")
        assert code == 0
        assert "ppo, seed 0: 2 rounds done" in err
        assert json.loads(text)["environments"] == json.loads((out / "summary.json").read_text(encoding="utf-8"))
        assert stamps(out / "runs") == before


def test_ctrl_c_promises_nothing_where_nothing_goes_on(whence, monkeypatch, tmp_path):
    def interrupt(path, **options):
        raise KeyboardInterrupt

    (tmp_path / "comparison.json").touch()
    monkeypatch.setattr("whence.lab.load_comparison", interrupt)
    assert whence("report", tmp_path) == (130, "", "Interrupted.")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_command_that_is_ended_leaves_no_worker(tmp_path, sent, code):
    exit_code, out, err = stop(tmp_path, "ppo", sent)  # returns when the last worker has gone
    assert (exit_code, out) == (code, "")
    assert "Traceback" not in err
    assert not (tmp_path / "runs" / "iif").exists()
    assert not (tmp_path / "summary.json").exists()


def test_on_a_terminal_bars_count_all_rounds(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(progress, "errors", Console(file=terminal, force_terminal=True, width=100))
    configs = [RunConfig(env="FrozenLake-v1", arm=arm, seed=0, rounds=3) for arm in ("ppo", "iif")]
    ppo, iif = (Planned(None, config.arm, config) for config in configs)
    with PlannedBars([ppo, iif]) as bars:
        bars.kept(ppo)
        for rounds in (0, 1, 2):
            bars.rounds(iif, rounds)
        bars._progress.refresh()
        assert "5/6" in terminal.getvalue()
        assert "iif, seed 0" in terminal.getvalue()
        bars.rounds(iif, 3)
        bars.ended(iif, None)
    assert "6/6" in terminal.getvalue()
    assert "rounds done" not in terminal.getvalue()


class TestFailures:
    """Of the machine, not of whence."""

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            (
                PermissionError(errno.EACCES, "Permission denied", "runs/lake"),
                "runs/lake cannot be used: Permission denied. Check its name, its permissions and the disk",
            ),
            (OSError("No space left on device (os error 28)"), "A file cannot be used: No space left on device (os"),
            (ModuleNotFoundError("No module named 'lake'", name="lake"), "Python finds no module 'lake'. Install"),
        ],
    )
    def test_they_name_what_failed_and_how_to_mend_it(self, whence, monkeypatch, tmp_path, failure, message):
        def fail(path, **options):
            raise failure

        monkeypatch.setattr("whence.runs.RunDirectory.open", fail)
        code, out, err = whence("report", tmp_path)
        assert (code, out) == (2, "")
        assert err.startswith("Error: ")
        assert message in err
        assert "no error that whence expects" not in err

    def test_others_stay_unexpected(self, whence, monkeypatch, tmp_path):
        def fail(path, **options):
            raise RuntimeError("a fault")

        monkeypatch.setattr("whence.runs.RunDirectory.open", fail)
        code, _, err = whence("report", tmp_path)
        assert code == 1
        assert err.startswith("Error: RuntimeError: a fault This is no error that whence expects: `whence --debug ...`")


@pytest.fixture(scope="module")
def wrong_runs(tmp_path_factory):
    """Runs that are wrong in one way each, and one that is right."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("lake", "cut"):
        run = RunDirectory.create(path / name, {"env": "FrozenLake-v1"})
        for number in (1, 2):
            run.write_round("records", number, pl.DataFrame({"record_id": [number], "score": [1.0]}))
    (path / "cut" / "records" / "round_00002.parquet").write_bytes(b"PAR1 and no more")
    for name in ("begun", "comparison/runs/ppo/seed_0"):
        RunDirectory.create(path / name, {"env": "FrozenLake-v1"})
    header = '{"format": "whence-run", "version": 99}'
    for name, text in (("broken", header[:30]), ("other", header)):
        (path / name).mkdir()
        (path / name / "config.json").write_text(text)
    (path / "taken").mkdir()
    (path / "taken" / "thesis.tex").write_text("do not lose")
    (path / "file").touch()
    return path


class TestWrongInput:
    """What came, what is needed and how to fix it; nothing is begun."""

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("train CartPole-v1 --engine gohst", "The engine 'gohst' is unknown. Did you mean ghost?"),
            ("train CartPole-v1 --target action", "The target 'action' does not take {}: "),
            ("train CartPole-v1 --env-kwargs '{map: 8x8}'", "--env-kwargs is '{map: 8x8}', which is not JSON"),
            ("train CartPole-v1 --policy MplPolicy", "The policy 'MplPolicy' is unknown. Did you mean MlpPolicy,"),
            ("train CartPole-v1 --n-steps 1", "Stable-Baselines3's PPO refuses these settings: `n_steps * n_envs`"),
            ("train CartPole-v1 --run taken", "taken exists and holds no config.json, so it is no run of whence's."),
            ("train CartPole-v1 --run lake", "lake holds a run of another configuration"),
            ("attribute nowhere", "nowhere is not there. Did you mean other?"),
            ("attribute file", "file is a file, and a run is a directory."),
            ("show lake/records", "lake/records is no run directory, and lake is one. Give that."),
            ("attribute .", "a folder of runs, and one run is needed. Give one of the runs in it: begun,"),
            ("why comparison", "comparison holds a comparison,"),
            ("attribute begun", "begun holds no rounds yet: its training is in round 1, or was interrupted there."),
            ("attribute lake --round 7", "lake/records/round_00007.parquet is not there; lake holds rounds 1 to 2."),
            ("report lake --rounds 1-99", "Round 3 is not in lake, which holds rounds 1 to 2: name these."),
            ("show cut --round 2", "cut/records/round_00002.parquet cannot be read as Parquet:"),
            ("report broken", "broken/config.json cannot be read as JSON: Unterminated string"),
            ("report other", "other/config.json is marked as version 99; this version of whence reads"),
            ("trian", "No such command 'trian'. Did you mean 'train'?"),
            ("compare", "Error: Give either an environment, such as LunarLander-v3, or --preset NAME; not both, not n"),
            ("compare FrozenLake-v1 --workers 0", "Error: workers is 0; at least 1 is needed."),
            ("compare FrozenLake-v1 --sedes 3", "No such option: --sedes"),
        ],
    )
    def test_of_a_command(self, whence, wrong_runs, monkeypatch, line, message):
        monkeypatch.chdir(wrong_runs)
        before = stamps(wrong_runs)
        code, out, err = whence(*shlex.split(line))
        assert (code, out) == (2, "")
        assert message in err
        assert "Traceback" not in err
        assert stamps(wrong_runs) == before


def test_a_language_models_run_is_not_taken_for_an_agents(whence, tmp_path):
    RunDirectory.create(tmp_path / "run", {"kind": "language", "arm": "ippo"})
    code, _, err = whence("attribute", tmp_path / "run")
    assert code == 2
    assert f"{tmp_path / 'run'} is a run of a language model" in err
    assert f"are in {tmp_path / 'run' / 'records'}; see them with: whence report {tmp_path / 'run'}" in err


class TestProgress:
    """Without a terminal."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    @pytest.fixture
    def clock(self):
        return self.Clock()

    def test_a_run_has_a_line_every_ten_seconds_and_one_at_its_end(self, capsys, clock):
        with progress.RunBar(9, clock) as bar:
            bar.update(0, {})
            for rounds, second in ((1, 3), (2, 12.9), (3, 13), (4, 22), (5, 24), (9, 24.5)):
                clock.now = second
                bar.update(rounds, {"test_return": rounds / 2, "dropped_share": 0.25})
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            f"round {rounds} of 9: test return {rounds / 2:.4g}, 75% kept" for rounds in (1, 3, 5, 9)
        ]

    def test_a_sweep_has_one_line_for_all_its_runs(self, capsys, clock):
        configs = [RunConfig(env="FrozenLake-v1", arm="ppo", seed=seed, rounds=3) for seed in (0, 1)]
        first, second = (Planned("lake", "ppo", config) for config in configs)
        with PlannedBars([first, second], clock) as table:
            for planned, done, now in ((first, 0, 0), (first, 1, 1), (second, 1, 2), (second, 2, 11), (first, 3, 11)):
                clock.now = now
                table.rounds(planned, done)
            clock.now = 65
            table.ended(first, None)
            table.ended(second, "it broke")
        assert capsys.readouterr().err.splitlines() == [
            "lake/ppo/seed_0: round 1 of 3",
            "lake/ppo/seed_1: round 2 of 3",
            "lake/ppo/seed_0: done in 0:01:05",
            "lake/ppo/seed_1: failed: it broke",
        ]
