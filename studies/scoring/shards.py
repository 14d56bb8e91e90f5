"""How much memory a process needs to score a model, where 1, 2 or 4 processes hold it in shards (FSDP2).

Run: `python -m studies.scoring.shards results/scoring [--size 100M] [--processes 1,2,4]`. The model of
`studies.scoring.cheap_scores`, with random weights, scores 16 rows by `SequenceReturn`, two at a time. Of each process:
the bytes of its parameters, the resident memory before scoring, and how much more it takes at most while scoring, by
Linux' own count. One process holds the whole model, and the target's gradient is whole there. Gloo, one torch thread
each.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from studies.benchmarks.timing import read_resident
from studies.markdown import table
from studies.scoring.cheap_scores import SHAPES, draw_rows, make_model
from whence.guards import write_atomically
from whence.layers import find_blocks
from whence.llm import SequenceReturn, TokenPPO
from whence.llm.base.processes import ONE, Processes
from whence.llm.scores.row_scores import Scoring, score

ROWS, AT_ONCE = 16, 2
MIB = 2**20


def measure(size: str, folder: Path) -> None:
    """Score in this process, one of several, and write what it took and the scores."""
    torch.set_num_threads(1)
    model: Any = make_model(size).language_model.eval()
    rows = draw_rows(make_model("1M"), ROWS)  # a small model's: their tokens do not matter here
    processes = ONE
    if dist.is_torchelastic_launched():
        processes = Processes(Accelerator(cpu=True))
        mesh = init_device_mesh("cpu", (processes.number,))
        for block in find_blocks(model)[1]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    scoring = Scoring(SequenceReturn(), TokenPPO(), 1.0, "ghost", None, AT_ONCE, processes)
    held = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    score(model, rows.take(slice(0, 2 * processes.number)), scoring)  # buffers of the first call
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free goes back, so that taking it again counts
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = read_resident("VmRSS")
    influence = score(model, rows, scoring)
    result = {"held": held, "before": before, "more": read_resident("VmHWM") - before}
    path = folder / f"{processes.rank}.json"
    path.write_text(json.dumps(result | {"scores": influence.scores.tolist()}), encoding="utf-8")
    if processes.number > 1:
        dist.barrier()
        os._exit(0)  # FSDP's threads sometimes abort an interpreter that ends


def run(size: str, number: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each of several processes took."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)] if number > 1 else []
    command = [sys.executable, *launcher, "-m", "studies.scoring.shards", "--size", size, "--inside", str(folder)]
    # Otherwise glibc keeps what FSDP frees: the peak is then that of its heap's gaps.
    subprocess.run(command, check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)})
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(number)]


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/scoring"),
    size: Annotated[str, typer.Option(help=f"Size of the model: {', '.join(SHAPES)}.")] = "100M",
    processes: Annotated[str, typer.Option(help="Numbers of processes, separated by commas.")] = "1,2,4",
    inside: Annotated[Path | None, typer.Option(help="Measure in this process, and write to this folder.")] = None,
) -> None:
    """Measure, and write shards.json and shards.md."""
    if inside is not None:
        measure(size, inside)
        return
    head = ["processes", "parameters held, MiB", "resident before, MiB", "more while scoring, MiB", "scores differ by"]
    lines, results, first = [], {}, None
    for number in (int(text) for text in processes.split(",")):
        each = run(size, number, Path("out/shards") / str(number))
        results[number] = [{name: one[name] for name in ("held", "before", "more")} for one in each]
        scores = torch.tensor(each[0]["scores"])
        first = scores if first is None else first
        most = [max(one[name] for one in each) / MIB for name in ("held", "before", "more")]
        difference = float((scores - first).abs().max() / first.abs().max())
        lines.append([str(number), *(f"{value:,.0f}" for value in most), f"{difference:.1g}"])
    text = table([head, *lines])
    print(text)
    for name, content in (("shards.json", json.dumps(results, indent=2)), ("shards.md", f"# Shards, {size}\n\n{text}")):
        with write_atomically(out / name) as temporary:
            temporary.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
