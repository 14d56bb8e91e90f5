"""What is shipped works without the source tree, and installs into an empty environment."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


pytestmark = pytest.mark.long


def run(*command: object, cwd: Path, **environment: str) -> str:
    # The environment of the test run must not leak in; and what one command compiles, the next one reads.
    leaking = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    clean = {name: value for name, value in os.environ.items() if name not in leaking} | environment
    process = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP, "wheel", ROOT, "--no-deps", "--wheel-dir", folder, cwd=folder)
    (path,) = folder.glob("whence_rl-*.whl")
    return path


def test_it_holds_all_that_the_command_needs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as shipped:
        names = shipped.namelist()
        shipped.extractall(tmp_path / "unpacked")
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src" / "whence").rglob("*") if path.is_file()]
    sources = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert sources == {name for name in names if ".dist-info/" not in name}
    whence = (sys.executable, "-c", "import whence; print(whence.__file__); from whence.cli import main; main()")
    train = ("train", "--preset", "lda-code/frozenlake", "--rounds", 1, "--eval-episodes", 2, "--run", "run")
    printed = run(*whence, *train, cwd=tmp_path, PYTHONPATH=str(tmp_path / "unpacked"))
    assert printed.startswith(str(tmp_path / "unpacked"))
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000


@pytest.mark.timeout(600)
def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    # Compiling all of the dependencies would take longer than installing them; imports compile what they need.
    install = (*PIP, "--python", tmp_path / "env" / "bin" / "python", "install", "--no-compile")
    run(sys.executable, *install, "--constraint", ROOT / "constraints.txt", f"{wheel}[cli]", cwd=tmp_path)
    whence = tmp_path / "env" / "bin" / "whence"
    tiny = ("--rounds", 1, "--eval-episodes", 2, "--seeds", 1, "--arms", "ppo,iif", "--workers", 1)
    run(whence, "compare", "CartPole-v1", *tiny, "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000
    assert "CartPole-v1" in json.loads((tmp_path / "out" / "summary.json").read_text())
