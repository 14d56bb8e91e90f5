"""Put one fault at a time into a copy of the sources; a named test must fail for each.

Run: `python tests/try_mutants.py [part of a name]`, or `make mutants`. The faults are in tests/mutants/*.toml. A mutant
that survives, a test that fails without the fault, or a text that is no longer in the file ends the run with an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault: `before` becomes `after` in a file below src/whence, and `test` must notice."""

    name: str
    file: str
    before: str
    after: str
    test: str


def load_mutants() -> list[Mutant]:
    """Return the mutants of every TOML file, in the order of the files."""
    files = sorted((ROOT / "tests" / "mutants").glob("*.toml"))
    tables = [tomllib.loads(file.read_text(encoding="utf-8"))["mutant"] for file in files]
    return [Mutant(**row) for rows in tables for row in rows]


def run_tests(sources: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests on the sources in a directory; one alone may have options: "test_a.py -k name"."""
    words = [word for test in tests for word in test.split()]
    arguments = [f"tests/{word}" if word.startswith("test_") and ".py" in word else word for word in words]
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", *arguments]
    environment = {"PYTHONPATH": str(sources / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=sources, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def group_tests(tests: Iterable[str]) -> list[list[str]]:
    """Return tests in groups for one run each: those of a file together, and each that has options alone."""
    groups: dict[str, list[str]] = {}
    for test in sorted(set(tests)):
        groups.setdefault(test if " " in test else test.partition("::")[0], []).append(test)
    return list(groups.values())


def copy_tree(directory: Path) -> Path:
    """Copy what the tests need, so that neither the mutant nor pytest touches the tree."""
    for name in ("src", "tests", "studies", "benchmarks"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, directory / name)
    return directory


def try_mutant(mutant: Mutant) -> str | None:
    """Return what is wrong with a mutant, or None where its test caught it."""
    with tempfile.TemporaryDirectory() as temporary:
        sources = copy_tree(Path(temporary))
        file = sources / "src" / "whence" / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.before) < 1:
            return f"{mutant.file} no longer holds {mutant.before!r}"
        file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        outcome = run_tests(sources, [mutant.test])
    if outcome.returncode == 0:
        return f"{mutant.test} does not notice"
    # A fixture that the fault breaks is an error of the test, with pytest's code for failures; what cannot be imported
    # has another.
    if outcome.returncode != 1 or not any(f"\n{word} tests" in outcome.stdout for word in ("FAILED", "ERROR")):
        return f"{mutant.test} did not run: {outcome.stdout[-400:]}{outcome.stderr[-400:]}"
    return None


def count_survivors(mutants: Sequence[Mutant], sources: Path, pool: Executor) -> int:
    """Return how many of the mutants are not caught; an error where a test fails in the copy, which has no fault."""
    groups = group_tests(m.test for m in mutants)
    outcomes = zip(groups, pool.map(partial(run_tests, sources), groups), strict=True)
    for tests, outcome in track(outcomes, "tests without a fault", total=len(groups)):
        if outcome.returncode:
            sys.exit(f"One of {tests} fails without a fault:\n{outcome.stdout[-2000:]}{outcome.stderr[-1000:]}")
    survived = 0
    verdicts = zip(mutants, pool.map(try_mutant, mutants), strict=True)
    for mutant, problem in track(verdicts, "mutants", total=len(mutants)):
        if problem:
            survived += 1
            print(f"SURVIVED {mutant.name}: {problem}")
    return survived


def main(chosen: Sequence[str]) -> int:
    """Try the mutants whose name holds one of the words, one for each core; return the number that were not caught."""
    mutants = [m for m in load_mutants() if not chosen or any(word in m.name for word in chosen)]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            survived = count_survivors(mutants, copy_tree(Path(temporary)), pool)
        finally:
            pool.shutdown(cancel_futures=True)  # else all that are left are tried after Ctrl-C
    print(f"{len(mutants) - survived} of {len(mutants)} mutants caught")
    return survived


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
