"""The suite's first impression: seconds from `pip install` of the wheel to the result of the README's first example."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from studies.benchmarks.cells import Cell, Result, Setting

ROOT = Path(__file__).resolve().parents[2]

STAGES = ("environment", "install", "first import", "example")


def list_cells() -> Iterator[Cell]:
    """Yield the only cell."""
    yield Cell("install/example", "install", measure_install)


def read_example() -> str:
    """Return the README's first block of Python."""
    (block, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return block


def run(*command: object, cwd: Path) -> str:
    """Run a command without this process' environment of packages, and return its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stdout + process.stderr)
    return process.stdout


def measure_install(setting: Setting) -> Result:
    """Return the seconds of each stage, once; where pip has the packages on disk they do not come from the net."""
    seconds = {}

    def time_stage(stage: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        seconds[stage] = time.perf_counter() - start
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
        run(sys.executable, *pip, "wheel", ROOT, "--no-deps", "--wheel-dir", folder, cwd=folder)
        (wheel,) = folder.glob("whence-*.whl")
        python = folder / "env" / "bin" / "python"
        time_stage("environment", lambda: run(sys.executable, "-m", "venv", folder / "env", cwd=folder))
        constraints = ("--constraint", ROOT / "constraints.txt")
        time_stage("install", lambda: run(python, *pip, "install", *constraints, f"{wheel}[sb3]", cwd=folder))
        time_stage("first import", lambda: run(python, "-c", "from whence.sb3 import InfluenceCallback", cwd=folder))
        (folder / "example.py").write_text(read_example(), encoding="utf-8")
        output = time_stage("example", lambda: run(python, "example.py", cwd=folder))
    if "record_id" not in output:
        raise RuntimeError(f"The example printed no table of records:\n{output}")
    return {"stages": seconds, "seconds": {"median": sum(seconds.values()), "turns": 1}}
