"""Scripts of the tests in several processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_script(launcher: Sequence[str], script: str, folder: Path) -> None:
    """Run a script of this directory by a launcher's module, on CPUs; it writes to the folder that is its argument."""
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(Path(__file__).parent / script), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
