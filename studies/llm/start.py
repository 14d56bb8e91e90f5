"""How many puzzles the laboratory `smollm2` solves before any training: `python -m studies.llm.start`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from datasets import concatenate_datasets

from whence.lab.language import PUZZLES, smollm2
from whence.llm import PPOConfig
from whence.llm.text import context_length, generate, read_prompts
from whence.stored.language.loading import load_language_model


def main(
    puzzles: Annotated[list[str] | None, typer.Argument(help="Those to measure; all, if none is named.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where the model is kept.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each puzzle, first those of the test.")] = 128,
    dtype: Annotated[str, typer.Option(help="Type of the parameters.")] = "float32",
) -> None:
    """Write a line of a table for each puzzle."""
    torch.set_num_threads(1)
    for puzzle in puzzles or PUZZLES:
        lab = smollm2(puzzle, cache)
        model, tokenizer = load_language_model(str(lab.model_path), dtype)
        rows = concatenate_datasets([lab.test, lab.train]).select(range(prompts))
        config = PPOConfig("runs/start", max_new_tokens=lab.max_new_tokens)
        ids = read_prompts(rows, tokenizer, config, context_length(model)).ids
        rewards, start = [], time.process_time()
        for sampling in (replace(config, top_k=1), config):
            torch.manual_seed(0)
            texts = generate(model, tokenizer, ids, sampling).texts
            rewards.append(torch.tensor(lab.reward(texts, texts, answer=list(rows["answer"]))))
        seconds = time.process_time() - start
        shares = [f"{float((each == 1).float().mean()):.1%} | {float(each.mean()):.3f}" for each in rewards]
        tokens = sum(map(len, ids)) / len(ids)
        typer.echo(f"| `{puzzle}` | {' | '.join(shares)} | {tokens:.0f} | {seconds / len(ids) / 2:.2f} |")


if __name__ == "__main__":
    typer.run(main)
