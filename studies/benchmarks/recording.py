"""What recording costs thousands of environments: CPU time of a round and peak memory, with whence and without.

    python -m studies.benchmarks.recording

trains `examples/ppo_isaac.py` in processes of their own, in turn without whence, with the learner's side recorded, with
the environments' side, and with scores, and prints medians of the paired differences.
"""

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from whence import KeepAll, ScoreAll

KINDS = {
    "plain": "without whence",
    "learner": "`Run(..., KeepAll())`",
    "environments": "`whence.record(env, ...)`",
    "scored": "`Run(...)`, with scores",
}


class NoRun:
    """A run that writes nothing and keeps every record."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def write_round(self, policy: Any, records: Any, **further: Any) -> Any:
        """Keep every record."""
        return SimpleNamespace(selection=SimpleNamespace(keep=torch.ones(len(records), dtype=torch.bool)))

    def close(self) -> None:
        """Do nothing."""


def measure(kind: str, rounds: int, num_envs: int) -> dict[str, float]:
    """Train in this process, and return the CPU seconds of a round, a median, and the peak memory in MiB."""
    path = Path(__file__).parents[2] / "examples" / "ppo_isaac.py"
    spec = importlib.util.spec_from_file_location("ppo_isaac", path)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    marks, make = list[float](), script.RecordBatch.from_rollout

    def mark(**columns: Any) -> Any:
        marks.append(time.process_time())
        return make(**columns)

    script.RecordBatch = SimpleNamespace(from_rollout=mark)
    if kind in ("plain", "environments"):
        script.Run = NoRun
    with tempfile.TemporaryDirectory() as folder:
        environments = f"{folder}/environments" if kind == "environments" else None
        rule = ScoreAll() if kind == "scored" else KeepAll()
        script.main(rule, rounds, num_envs, path=f"{folder}/learner", environments=environments)
    seconds = median(after - before for before, after in pairwise(marks))
    return {"seconds": seconds, "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def main() -> None:
    """Measure each kind several times in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="measure one kind in this process, and print it as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--envs", type=int, default=4096)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind, options.rounds, options.envs)))
        return
    command = [sys.executable, "-m", "studies.benchmarks.recording", "--rounds", str(options.rounds)]
    command += ["--envs", str(options.envs), "--kind"]
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind, each in results.items():
            output = subprocess.run([*command, kind], check=True, capture_output=True, text=True).stdout
            each.append(json.loads(output.splitlines()[-1]))
    print(f"| {options.envs:,} environments × 24 steps | CPU s a round | more | peak MiB | more |")
    print("| --- | --- | --- | --- | --- |")
    for kind, each in results.items():
        pairs = [*zip(each, results["plain"], strict=True)]
        share = median(one["seconds"] / plain["seconds"] - 1 for one, plain in pairs)
        more = median(one["mebibytes"] - plain["mebibytes"] for one, plain in pairs)
        numbers = [median(one[name] for one in each) for name in ("seconds", "mebibytes")]
        print(f"| {KINDS[kind]} | {numbers[0]:.2f} | {share:+.1%} | {numbers[1]:.0f} | {more:+.0f} |", flush=True)


if __name__ == "__main__":
    main()
