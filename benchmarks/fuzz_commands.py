"""The command on damaged runs, and whole command lines, in this process and stopped before they train."""

import contextlib
import io
import random
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.fuzz_bench import Bench
from benchmarks.fuzz_damage import damage_bytes, draw_text
from whence import cli

RUNS = ("agent", "script", "language")


class Trained(BaseException):
    """A command came as far as training, or as serving a page."""


class Finding(Exception):
    """A reader did what it must not do, without an error."""


def damage_run(bench: Bench, rng: random.Random, names: Sequence[str] = ("agent", "script", "language")) -> str:
    """Damage a file or two of a run, and return the run's name."""
    name = rng.choice(names)
    for _ in range(rng.choice((1, 1, 1, 2))):
        bench.damage(rng.choice(bench.files(f"{name}/")), rng)
    return name


def call_command(arguments: Sequence[str]) -> None:
    """Call the command in this process; a finding if it ends otherwise than a command may."""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    code: Any = 0
    sys.argv = ["whence", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code
    except Trained:
        return
    finally:
        sys.argv = before
    text = out.getvalue() + err.getvalue()
    if code not in (0, None, 1, 2) or "Traceback (most recent" in text:
        raise Finding(f"exit code {code}: {text[-300:]}")
    if "This is no error that whence expects" in text:
        raise Finding(f"an error that whence does not expect: {text[-500:]}")
    if code and not text.strip():
        raise Finding(f"exit code {code} without a message: {out.getvalue()[-200:]}")
    if controls := {char for char in text if ord(char) < 32 or 127 <= ord(char) < 160} - {"\n", "\t", "\r"}:
        raise Finding(f"control characters {controls} in what is printed: {text[:300]!r}")


OF_RUNS: Sequence[tuple[str, ...]] = (
    *(
        ("show", "RUN"),
        ("show", "RUN", "--record", "40", "--json"),
        ("show", "RUN", "--changed", "--continuations", "0"),
    ),
    *(("show", "RUN", "--bottom", "3", "--by", "reward", "--continuations", "0"), ("show", "RUN", "--round", "1")),
    *(
        ("diagnose", "RUN", "--measure", "visits"),
        ("diagnose", "RUN", "--rounds", "1,2"),
        ("attribute", "RUN", "--top", "3"),
    ),
    *(("attribute", "RUN", "--target", "action", "--record", "40"), ("why", "RUN", "--record", "40"), ("why", "RUN")),
    *(
        ("phases", "RUN", "--record", "40", "--neighbours", "5"),
        ("phases", "RUN"),
        ("report", "RUN", "--out", "p.html"),
    ),
    *(
        ("export", "RUN", "--to", "jsonl", "--out", "o.jsonl"),
        ("export", "RUN", "--to", "parquet", "--out", "o.parquet"),
    ),
    *(
        ("llm", "why", "RUN", "--round", "1"),
        ("llm", "why", "RUN", "--record", "5"),
        ("counterfactual", "RUN", "--round", "2"),
    ),
    *(
        ("intervene", "RUN", "--rounds", "2"),
        ("why", "RUN", "--by", "similar", "--record", "40", "--json"),
        ("view", "RUN"),
    ),
)
"""Commands that read a run."""


def read_by_command(bench: Bench, rng: random.Random) -> None:
    """Commands that read a damaged run."""
    name = damage_run(bench, rng, ("agent", "agent", "script", "language"))
    arguments = rng.choice(OF_RUNS)
    if arguments[0] == "llm" or name == "language":
        arguments = rng.choice(
            [line for line in OF_RUNS if line[0] in ("llm", "show", "report", "export", "attribute")]
        )
    call_command([str(bench.stage / name) if word == "RUN" else word for word in arguments])


_LINES: Sequence[tuple[str, ...]] = (
    *OF_RUNS,
    *(("train", "CartPole-v1", "--rounds", "2", "--run", "runs/new"), ("train", "--preset", "lda-code/frozenlake")),
    *(("train", "FrozenLake-v1", "--target", "action", "--observation", "3", "--action", "1", "--drop", "0.5"),),
    *(("train", "CartPole-v1", "--set", "hyperparameters.n_steps=8", "--policy-kwargs", '{"net_arch": [4]}'),),
    *(
        ("compare", "CartPole-v1", "--arms", "ppo,iif", "--seeds", "2", "--out", "out"),
        ("sweep", "SWEEP", "--out", "out"),
    ),
    *(("sweep", "SWEEP", "--only", "lake/iif"), ("table", "RESULTS", "--no-pictures"), ("diff", "RESULTS", "RESULTS")),
    *(("list",), ("list", "arms", "--all"), ("--version",), ("--help",), ("train", "--help"), ("llm", "--help"), ()),
    *(
        ("llm", "train", "--task", "arithmetic", "--size", "tiny"),
        ("llm", "train", "--selection", "iif", "--lora", "2"),
    ),
    *(
        ("llm", "train", "--model", "absent", "--dataset", "absent", "--reward", "absent.py:f"),
        ("report", "COMPARISON"),
    ),
    *(
        ("llm", "compare", "--task", "civility", "--arms", "none,iif", "--seeds", "2"),
        ("view", "COMPARISON", "--port", "0"),
    ),
)
"""Command lines that are changed."""

_WORDS = (
    *(
        "--help",
        "--json",
        "--seed",
        "--rounds",
        "--round",
        "--record",
        "--top",
        "--set",
        "--arms",
        "--env",
        "--drop",
        "--",
    ),
    *(
        "-1",
        "0",
        "1",
        "1e9",
        "nan",
        "inf",
        "ppo,iif",
        "ppo,ppo",
        "return",
        "action",
        "{}",
        "[1, 2]",
        "true",
        "--nope",
        "-x",
    ),
    *(
        "train",
        "show",
        "llm",
        "iif",
        "CartPole-v1",
        "FrozenLake-v1",
        "a=b",
        "rounds=3",
        "5-1",
        "1-3",
        ",",
        "9" * 30,
        "0x1",
    ),
    *(
        "--observation",
        "--action",
        "--by",
        "--to",
        "--engine",
        "loop",
        "--target",
        "--bottom",
        "--episode",
        "--device",
        "gpu",
    ),
)


def read_command_line(bench: Bench, rng: random.Random) -> None:
    """Whole command lines, mutated or random."""
    words = list(rng.choice(_LINES)) if rng.random() < 0.9 else [rng.choice(_WORDS) for _ in range(rng.randrange(5))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(words) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(words):
            del words[at]
        elif kind == 1 and at < len(words):
            words[at] = rng.choice((*_WORDS, draw_text(rng)))
        elif kind == 2 and at < len(words):
            words[at] = damage_bytes(words[at].encode(), rng).decode("utf-8", "replace")
        elif kind == 3 and at < len(words):
            words.insert(at, words[at])
        else:
            words.insert(at, rng.choice((*_WORDS, draw_text(rng))))
    if words and words[0] == "doctor":
        return
    places = {"SWEEP": "sweep.toml", "RESULTS": "sweep", "COMPARISON": "comparison", "RUN": rng.choice(RUNS)}
    call_command([str(bench.stage / places[word]) if word in places else tame(word) for word in words])


def tame(word: str) -> str:
    """Return a word that names no file outside of the working directory, since a command may write where it is told."""
    return re.sub(r"[/\\~]|\.\.", "_", word.replace("\x00", ""))


@contextlib.contextmanager
def stop_before_training() -> Iterator[None]:
    """Raise `Trained` where a command would train, start processes, roll out for long, serve or open a browser."""
    from importlib import import_module

    import stable_baselines3.common.on_policy_algorithm as on_policy

    from whence import experiments, viewer
    from whence.experiments import comparison, sweep
    from whence.experiments.llm import rebuilding, training
    from whence.experiments.rl import continuations

    counterfactual, intervene = (import_module(f"whence.cli.{name}") for name in ("counterfactual", "intervene"))

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Trained

    measure = continuations.estimate_advantages

    def measure_few(run: Any, number: int, records: Any, *, continuations: int, **settings: Any) -> Any:
        if continuations > 16 or len(records) > 2:
            raise Trained
        return measure(run, number, records, continuations=continuations, **settings)

    places: Sequence[tuple[Any, str]] = (
        *((on_policy.OnPolicyAlgorithm, "learn"), (experiments, "run"), (comparison, "run_all"), (sweep, "run_all")),
        *((training, "run"), (training, "prepare"), (rebuilding, "load_task")),
        *((counterfactual, "study"), (counterfactual, "leave_out"), (intervene, "intervene_round")),
        *((intervene, "leave_out_group"), (viewer, "serve"), (advantages, "estimate_advantages")),
        (continuations, "estimate_advantages"),
    )
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, _ in before:
        setattr(owner, name, measure_few if owner is continuations else stop)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
