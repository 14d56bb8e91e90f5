"""Read damaged and hostile inputs with every reader and the command; count them, and what went wrong.

    python -m benchmarks.fuzz results/reliability --inputs 100000

A reader may raise whence's own errors, the command may end with exit code 1 or 2 and a message. Everything else is a
finding: another error, more than ten seconds, a change outside of the run, a process that dies. An input is drawn from
the seed, the reader's name and the input's number. `--reader NAME` reads one reader's inputs again.
"""

import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

MOST_SECONDS = 10.0
"""The longest that an input may take."""

MEMORY = 12 * 2**30
"""Bytes of addresses of a process, so that an input that asks for all memory ends the process and not the machine."""

SHOWN = 40
"""Findings that a reader's process writes in full."""


class TooSlow(BaseException):
    """An input takes more than `MOST_SECONDS`."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the block after so many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TooSlow(f"took more than {seconds:g} s")

    before, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    other, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # a test has a limit of its own, which goes on
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(0.01, other - (time.monotonic() - start)) if other else 0)
        signal.signal(signal.SIGALRM, before)


def read_input(bench: Any, name: str, seed: int, number: int) -> tuple[float, str | None]:
    """Read one input; return its seconds, and what went wrong, or None."""
    from benchmarks.fuzz_commands import Trained
    from benchmarks.fuzz_readers import READERS

    random_numbers, start = random.Random(f"{seed}/{name}/{number}"), time.perf_counter()
    try:
        with limit_seconds(MOST_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[name][1](bench, random_numbers)
    except Trained:
        failure = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a Rust panic is no Exception
        failure = describe_failure(error)
    else:
        failure = None
    seconds = time.perf_counter() - start
    bench.restore()
    try:
        bench.check_around()
    except BaseException as error:
        failure = describe_failure(error)
        bench.open()
    return seconds, failure


def describe_failure(error: BaseException) -> str:
    """Return an error in a line, with where in whence it arose."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/whence/" in frame.filename]
    place = f"{frames[-1].filename.rpartition('/whence/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {place}: {str(error)[:300]}"


def read_inputs(bench: Any, name: str, seed: int, first: int, count: int, on_input: Any = lambda number: None) -> Any:
    """Read a reader's inputs; return how many there were, the longest seconds and the findings."""
    slowest, findings = 0.0, []
    for number in range(first, first + count):
        on_input(number)
        seconds, failure = read_input(bench, name, seed, number)
        slowest = max(slowest, seconds)
        if failure is not None:
            findings.append({"input": number, "what": failure})
    return {"inputs": count, "slowest": slowest, "findings": findings}


def share_inputs(inputs: int) -> dict[str, int]:
    """Return how many inputs each reader gets, at least one."""
    from benchmarks.fuzz_readers import READERS

    total = sum(part for part, _ in READERS.values())
    return {name: max(1, round(inputs * part / total)) for name, (part, _) in READERS.items()}


def prepare_process(root: Path) -> None:
    """Keep caches below a directory, stay off the network, and limit memory."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(root / "work-caches"),
        "MPLCONFIGDIR": str(root / "work-caches"),
    }
    caches = root / "work-caches"
    caches.mkdir(exist_ok=True)
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "COLUMNS": "200", "TMPDIR": str(caches)}
    sys.dont_write_bytecode = True
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def run_reader(name: str, seed: int, first: int, count: int, root: Path) -> dict[str, Any]:
    """Read a reader's inputs in this process, and note which input is read, for the case that the process dies."""
    prepare_process(root)
    from benchmarks.fuzz_bench import Bench, watch
    from benchmarks.fuzz_commands import stop_before_training

    bench = Bench.create(root / "bench")
    os.chdir(bench.work)
    inside = [str(path.resolve()) for path in (root, Path("/dev"))]
    watch(lambda path: str(Path(os.path.abspath(path))).startswith(tuple(inside)))
    noted = os.open(root / "input", os.O_CREAT | os.O_WRONLY)

    def note(number: int) -> None:
        os.pwrite(noted, b"%012d" % number, 0)

    with stop_before_training():
        return read_inputs(bench, name, seed, first, count, note)  # type: ignore[no-any-return]


def run_in_process(name: str, seed: int, first: int, count: int) -> dict[str, Any]:
    """Read a reader's inputs in a process of its own; where it dies, the input is a finding, and another goes on."""
    total: dict[str, Any] = {"inputs": 0, "slowest": 0.0, "findings": []}
    while total["inputs"] < count:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            root = Path(folder)
            start = first + total["inputs"]
            rest = count - total["inputs"]
            command = [sys.executable, "-m", "benchmarks.fuzz", "unused", "--seed", str(seed), "--reader", name]
            command += ["--first", str(start), "--inputs", str(rest), "--root", str(root)]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            file = root / "done.json"
            if child.returncode == 0 and file.exists():
                part = json.loads(file.read_text(encoding="utf-8"))
            else:
                place = root / "input"
                if not place.exists():
                    sys.exit(f"{name} did not begin:\n{child.stderr[-3000:]}")
                number = int(place.read_text())
                what = f"the process died ({child.returncode}): {child.stderr[-400:]}"
                part = {"inputs": number - start + 1, "slowest": 0.0, "findings": [{"input": number, "what": what}]}
        total["inputs"] += part["inputs"]
        total["slowest"] = max(total["slowest"], part["slowest"])
        total["findings"] += part["findings"]
    return total


def main(
    out: Annotated[Path, typer.Argument(help="The directory of fuzz.json and fuzz.md.")],
    inputs: Annotated[int, typer.Option(help="Inputs of all readers together.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Of all inputs.")] = 0,
    reader: Annotated[
        str | None, typer.Option(help="This reader alone is read, its share of the inputs; the others' results stay.")
    ] = None,
    first: Annotated[int, typer.Option(help="The number of the first input.", min=0)] = 0,
    root: Annotated[Path | None, typer.Option(help="The directory of a reader's process.", hidden=True)] = None,
) -> None:
    """Read damaged and hostile inputs with every reader and the command, and write what went wrong."""
    if root is not None and reader is not None:  # in a reader's own process, which reads just so many
        part = run_reader(reader, seed, first, inputs, root)
        (root / "done.json").write_text(json.dumps(part), encoding="utf-8")
        return
    readers = read_results(out) if reader is not None else {}
    shares = share_inputs(inputs)
    for name, count in (shares if reader is None else {reader: shares[reader]}).items():
        began = time.perf_counter()
        readers[name] = run_in_process(name, seed, first, count)
        readers[name]["seconds"] = round(time.perf_counter() - began, 1)
        findings = readers[name]["findings"]
        print(
            f"{name}: {readers[name]['inputs']} inputs, {len(findings)} findings, {readers[name]['seconds']} s",
            flush=True,
        )
        for finding in findings[:SHOWN]:
            print(f"  {finding['input']}: {finding['what']}", flush=True)
        write_results(out, readers, seed, inputs)
    raise typer.Exit(int(any(part["findings"] for part in readers.values())))


def read_results(out: Path) -> dict[str, Any]:
    """Return what a directory's fuzz.json has of each reader; nothing if it is not there."""
    file = out / "fuzz.json"
    if not file.exists():
        return {}
    readers = json.loads(file.read_text(encoding="utf-8"))["readers"]
    return {
        name: {**part, "slowest": part["slowest_input"], "findings": part.get("findings", [])}
        for name, part in readers.items()
    }


def write_results(out: Path, readers: dict[str, Any], seed: int, asked: int) -> None:
    """Write fuzz.json, and put its figures into fuzz.md if that is there."""
    content = {
        "inputs": sum(part["inputs"] for part in readers.values()),
        "asked": asked,
        "failures": sum(len(part["findings"]) for part in readers.values()),
        "seed": seed,
        "seconds": round(sum(part["seconds"] for part in readers.values()), 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "readers": {
            name: {
                "inputs": part["inputs"],
                "failures": len(part["findings"]),
                "seconds": part["seconds"],
                "slowest_input": round(part["slowest"], 2),
                **({"findings": part["findings"]} if part["findings"] else {}),
            }
            for name, part in readers.items()
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "fuzz.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    page = out / "fuzz.md"
    if page.exists():
        text = page.read_text(encoding="utf-8")
        for mark, lines in (("figures", list_figures(content)), ("table", list_readers(content))):
            head, begin, rest = text.partition(f"<!-- {mark} -->\n")
            _, end, tail = rest.partition(f"<!-- end of {mark} -->")
            text = f"{head}{begin}{lines}{end}{tail}"
        page.write_text(text, encoding="utf-8")


def list_figures(content: dict[str, Any]) -> str:
    """Return the page's lines of the answer and the figure."""
    failures, inputs = content["failures"], content["inputs"]
    slowest = max(part["slowest_input"] for part in content["readers"].values())
    answer = "no" if not failures else f"yes, {failures} of them"
    return (
        f"- **Answer**: {answer}. The slowest of them took {slowest:.1f} s; nothing around the runs changed.\n"
        f"- **Figure**: {inputs:,} inputs of {len(content['readers'])} readers, {failures} failures, seed "
        f"{content['seed']}, {content['seconds'] / 60:.0f} minutes\n  ({content['machine']}).\n"
    )


def list_readers(content: dict[str, Any]) -> str:
    """Return the page's table of inputs per reader."""
    rows = [
        f"| {name} | {part['inputs']:,} | {part['failures']} | {part['slowest_input']:.2f} |"
        for name, part in content["readers"].items()
    ]
    head = ["| reader | inputs | failures | slowest, s |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    typer.run(main)
