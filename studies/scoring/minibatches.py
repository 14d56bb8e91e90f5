"""The time of scoring responses compared with that of optimising on them, with a LoRA adapter, by minibatch size.

Run: `python -m studies.scoring.minibatches`. The laboratory's model, an adapter of rank 16 on every linear layer, 256
responses a round, 4 epochs; scores are of `SequenceReturn` over the batch. One torch thread; process CPU seconds. LDA's
own run optimises with minibatches of 1.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from whence import KeepAll, NonPositive
from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.tasks import load_task
from whence.experiments.llm.training import make_trainer
from whence.runs import RunDirectory


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of each run; the first is not counted.")] = 5,
    size: Annotated[str, typer.Option(help="Size of the laboratory.")] = "small",
    batches: Annotated[str, typer.Option(help="Sizes of minibatches.")] = "1,16,64,256",
    batch_size: Annotated[int, typer.Option(help="Responses a round.")] = 256,
) -> None:
    """Measure."""
    torch.set_num_threads(1)
    table = Table("minibatch", "optimisation, s", "scoring, s", "share", title="Medians of rounds [lowest, highest]")
    for minibatch in (int(text) for text in batches.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            ppo = {"rounds": rounds, "mini_batch_size": minibatch, "batch_size": batch_size, "ppo_epochs": 4}
            config = LanguageConfig("iif-sequence", 0, size=size, lora=16, settings={**ppo, "eval_every": 0})
            trainer = make_trainer(config, load_task(config), Path(folder) / "run")
            trainer.rule = ScoreAndKeepAll()
            trainer.train()
            seconds = RunDirectory.open(Path(folder) / "run").table("timings")[1:]
        shares = (seconds["scoring_cpu"] / seconds["optimisation_cpu"]).to_list()
        cells = [_format_cell(seconds[f"{stage}_cpu"].to_list(), "{:.3g}") for stage in ("optimisation", "scoring")]
        table.add_row(str(minibatch), *cells, _format_cell(shares, "{:.1%}"))
    Console().print(table)


class ScoreAndKeepAll(NonPositive):
    """Score every response and drop none."""

    def select(self, records, influence, progress):
        """Keep all."""
        return KeepAll().select(records)


def _format_cell(values: list[float], form: str) -> str:
    middle, low, high = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} [{low}, {high}]"


if __name__ == "__main__":
    typer.run(main)
