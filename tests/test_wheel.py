"""What is shipped installs into an empty environment, and works there without the source tree."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, cwd: Path) -> str:
    # The environment of the test run must not leak in; and what one command compiles, the next one reads.
    leaking = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    clean = {name: value for name, value in os.environ.items() if name not in leaking}
    process = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.timeout(600)
def test_the_wheel_works_without_the_source_tree(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    run(sys.executable, *pip, "wheel", ROOT, "--no-deps", "--wheel-dir", tmp_path, cwd=tmp_path)
    (wheel,) = tmp_path.glob("whence-*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert {"whence/experiments/rl/presets.toml", "whence/report/template.html"} <= shipped
    assert not [name for name in shipped if name.startswith(("tests", "docs", "results"))]
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    # Compiling all of the dependencies would take longer than installing them; imports compile what they need.
    install = (*pip, "--python", tmp_path / "env" / "bin" / "python", "install", "--no-compile")
    run(sys.executable, *install, "--constraint", ROOT / "constraints.txt", f"{wheel}[cli]", cwd=tmp_path)
    whence = tmp_path / "env" / "bin" / "whence"
    doctor = json.loads(run(whence, "doctor", "--json", cwd=tmp_path))
    assert doctor["sound"] is True
    assert doctor["extras"]["contrib"] == {"sb3-contrib": None}
    assert doctor["extras"]["envs"] == {"Box2D": None, "minigrid": None}
    tiny = ["--rounds", 1, "--eval-episodes", 2, "--seeds", 1, "--arms", "ppo,iif", "--workers", 1]
    run(whence, "compare", "CartPole-v1", *tiny, "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000
    assert "CartPole-v1" in json.loads((tmp_path / "out" / "summary.json").read_text())
