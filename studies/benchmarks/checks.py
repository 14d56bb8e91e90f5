"""What the checks of a policy and an engine cost: in a training's first round, and in a later one.

python -m studies.benchmarks.checks
"""

import copy
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import torch

from studies.benchmarks.engines import score
from studies.benchmarks.policies import make_subject
from whence import attribution
from whence.engines import auto
from whence.sb3 import policy as sb3_policy

RECORDS = 2048
CHECKS = {
    "log-probs of the rollout": (sb3_policy, "warn_of_log_probs"),
    "view against policy": (sb3_policy, "_has_plain_parts"),
    "mixing, training mode": (attribution, "_check_mixing"),
    "mixing": (auto, "check_mixing"),
    "engine against loop": (auto, "check_against_loop"),
}
"""Where each check is called from, by what it compares. The second may run within the first."""


def time_checks(run: Any) -> dict[str, float]:
    """Return the CPU seconds of a run, and those of each check in it."""
    seconds = dict.fromkeys(CHECKS, 0.0)

    def add_clock(name: str, check: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            start, before = time.process_time(), sum(seconds.values())
            try:
                return check(*arguments)
            finally:
                within = sum(seconds.values()) - before
                seconds[name] += time.process_time() - start - within

        return timed

    with ExitStack() as stack:
        for name, (module, function) in CHECKS.items():
            stack.enter_context(mock.patch.object(module, function, add_clock(name, getattr(module, function))))
        start = time.process_time()
        run()
    return {"whole": time.process_time() - start, **seconds}


def measure_checks(name: str, turns: int) -> None:
    """Print the median milliseconds of a first and a later scoring with the shares of the checks, turn by turn."""
    subject = make_subject(name, "cpu")
    records, rounds = subject.records(RECORDS), dict[str, list[dict[str, float]]]()
    for _ in range(turns):
        policy = copy.deepcopy(subject.policy)
        run = score(replace(subject, policy=policy), records, "auto")

        def run_first(policy: Any = policy, run: Any = run) -> None:
            sb3_policy.warn_of_log_probs(policy, records)
            run()

        rounds.setdefault("first", []).append(time_checks(run_first))
        rounds.setdefault("later", []).append(time_checks(run))
    for which, each in rounds.items():
        medians = {part: median(one[part] for one in each) for part in each[0]}
        for part, value in medians.items():
            print(f"{name:7s} {which} round  {part:25s} {1e3 * value:8.2f} ms {value / medians['whole']:7.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_checks("mlp", 21)
    measure_checks("nature", 5)
