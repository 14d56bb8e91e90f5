"""Run the tests of what other libraries can break, under their oldest and newest versions: `make versions`.

Each set of versions gets an environment of its own in `out/versions`, and a row in `results/versions.md`. A Python that
is not on the path is said to be missing. Options: the names of the sets to run, such as `oldest`.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "versions"
TABLE = ROOT / "results" / "versions.md"

OLDEST = {
    **{"stable-baselines3": "2.7.0", "sb3-contrib": "2.7.0", "gymnasium": "1.1.0", "transformers": "5.3.0"},
    **{"trl": "1.13.0", "polars": "1.30.0", "safetensors": "0.5.0", "filelock": "4.2.0"},
}
"""The bounds of `pyproject.toml`, but for torch's: its older wheels need gigabytes of CUDA libraries."""

FOLLOW = ("tokenizers", "huggingface-hub", "httpx", "polars-runtime-32", "minigrid", "highway-env")
"""What is not pinned beside the oldest, since its version follows from theirs."""

# Old Gymnasiums ask for a Box2D that is compiled, and TRL 1.13 imports requests without asking for it.
PACKAGES = (
    *("--editable", ".[cli,fast,llm]", "Box2D", "minigrid", "highway-env", "requests"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)

SETS = {
    "oldest": "3.11",
    "newest": "3.11",
    **{f"newest, Python {python}": python for python in ("3.12", "3.13", "3.14")},
}
"""The Python of each set by its name."""

TESTS = (
    *("tests/sb3/test_sb3.py", "tests/sb3/test_callback.py", "tests/sb3/test_resume.py", "tests/hosts"),
    *("tests/sb3/test_episode_replay.py", "tests/runs/test_runs.py", "tests/scores/test_moments.py"),
    *("tests/lab/test_rounds.py", "tests/lab/test_experiments_llm.py", "tests/llm/test_llm_trl.py"),
    *("tests/llm/test_llm_engines.py", "tests/llm/test_llm_trainer.py"),
)

SHOWN = ("torch", "stable-baselines3", "gymnasium", "transformers", "trl", "polars")

HEAD = f"""# Oldest and newest versions

`make versions` runs {len(TESTS)} files and folders of tests, those that other libraries' versions can break,
in an environment of its own for each row. "Oldest" has the lower bounds of `pyproject.toml`, but
for torch; "newest" is what pip takes without pins. `make test` has the pinned versions and all tests.

| set | Python | {" | ".join(SHOWN)} | date | passed | failed | skipped |
|{" --- |" * (len(SHOWN) + 6)}
"""


def normalise(name: str) -> str:
    """Return a package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pin_oldest(constraints: str) -> str:
    """Return the constraints with the oldest versions in place of the pinned ones."""
    pins = [line for line in constraints.splitlines() if "==" in line]
    others = [line for line in pins if normalise(line.split("==")[0]) not in {*OLDEST, *FOLLOW}]
    return "\n".join([*others, *(f"{name}=={version}" for name, version in OLDEST.items())]) + "\n"


def count(output: str) -> list[str]:
    """Return how many tests passed, failed and were skipped, as pytest's last line says."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    numbers = {word: number for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = int(numbers.get("failed", 0)) + int(numbers.get("error", 0))
    return [numbers.get("passed", "0"), str(failed), numbers.get("skipped", "0")]


def has_python(python: str) -> bool:
    """Return whether a version of Python is on the path."""
    try:
        return not subprocess.run([f"python{python}", "--version"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


def install(name: str, python: str) -> tuple[Path, str]:
    """Make a set's environment; return its Python and pip's error, "" if there was none."""
    home = OUT / re.sub(r"\W+", "-", name)
    subprocess.run([f"python{python}", "-m", "venv", "--clear", str(home)], check=True)
    executable, options = home / "bin" / "python", list[str]()
    if name == "oldest":
        pins = home / "constraints.txt"
        pins.write_text(pin_oldest((ROOT / "constraints.txt").read_text()))
        options = ["--constraint", str(pins)]
    command = [str(executable), "-m", "pip", "install", "--quiet", *options, *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return executable, (errors or ["pip failed"])[0] if done.returncode else ""


def list_versions(executable: Path) -> list[str]:
    """Return the versions of the libraries that are shown."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    return subprocess.check_output([str(executable), "-c", code, *SHOWN], text=True).split()


def run(name: str, python: str) -> tuple[list[str], bool]:
    """Return a set's row, and whether something failed."""
    missing = ["–"] * len(SHOWN)
    if not has_python(python):
        return [name, python, *missing, str(date.today()), "not run: no such Python here", "–", "–"], False
    executable, error = install(name, python)
    if error:
        return [name, python, *missing, str(date.today()), f"not installed: {error}", "–", "–"], True
    command = [str(executable), "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", *TESTS]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    return [name, python, *list_versions(executable), str(date.today()), *count(done.stdout)], bool(done.returncode)


def main(names: Sequence[str]) -> int:
    """Run the sets of these names, or all, and write their rows; return whether a test failed."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    code = 0
    for name, python in SETS.items():
        if names and name not in names:
            continue
        row, has_failed = run(name, python)
        code |= has_failed
        rows[name] = f"| {' | '.join(row)} |"
        print(rows[name], flush=True)
        TABLE.write_text(HEAD + "".join(f"{rows[one]}\n" for one in SETS if one in rows), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
