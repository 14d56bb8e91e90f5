"""The library without the laboratory, `whence.lab`: recording, findings, page, why and prove work on anyone's run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RECORD_AND_ASK = """
from importlib.util import find_spec
from stable_baselines3 import PPO
from typer.testing import CliRunner

import whence
from whence.cli import app
from whence.sb3 import InfluenceCallback

assert find_spec("whence.lab") is None, whence.__file__
model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=1, seed=0, device="cpu")
model.learn(128, callback=InfluenceCallback(run="run"))
assert whence.RunDirectory.open("run").rounds() == [1, 2]
for arguments in (
    ["findings", "run"],
    ["report", "run"],
    ["attribute", "run"],
    ["show", "run"],
    ["why", "run", "--record", "70"],
    ["prove", "run", "--record", "70", "--top", "8", "--seeds", "1", "--test-episodes", "2"],
    ["list"],
):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    print(arguments[0], len(done.output))
for arguments, refusal in (
    (["train", "CartPole-v1"], "No such command 'train'"),
    (["list", "arms"], "needs the laboratory, whence.lab"),
):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert refusal in f"{done.output} {done.exception}", done.output
assert "Laboratory" not in CliRunner().invoke(app, ["--help"]).output
"""

FILES = (
    *("test_callback", "test_environment_steps", "test_explorer", "test_findings", "test_keeping"),
    *("test_language_page", "test_llm_answers", "test_loops", "test_recurrent", "test_rollout_scores", "test_runs"),
    "test_viewer",
)
"""The files of tests of recording, findings, page, why and prove that need no laboratory."""


@pytest.fixture
def copy(tmp_path):
    """A folder with whence's sources but the laboratory's, and an environment in which Python finds them first."""
    shutil.copytree(ROOT / "src" / "whence", tmp_path / "src" / "whence", ignore=shutil.ignore_patterns("lab"))
    return {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "XDG_STATE_HOME": str(tmp_path / "state")}


def run(arguments, folder, environment):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_is_recorded_looked_at_and_proved(copy, tmp_path):
    shown = run(["-W", "error", "-c", RECORD_AND_ASK], tmp_path, copy)
    assert [line.split()[0] for line in shown.splitlines()] == [
        *("findings", "report", "attribute", "show", "why", "prove", "list"),
    ]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tests_that_need_no_laboratory_pass(copy):
    files = [str(next((ROOT / "tests").rglob(f"{name}.py"))) for name in FILES]
    run(["-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", *files], ROOT, copy)
