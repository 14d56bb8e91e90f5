"""The work of a round on models of 7B and 70B parameters, as `whence llm train --dry-run` counts it.

Run: `python -m studies.scoring.large_models results/scoring`. Llama's shapes without weights, 512 rows of 512 tokens in
the prompt and 512 in the response, minibatches of 4, four epochs; all parameters, and adapters of rank 16. Nothing is
trained and no weights are made. Takes about four minutes.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from studies.markdown import table
from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.estimate import Estimate, estimate_run
from whence.guards import write_atomically

SHAPES: Mapping[str, Mapping[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
}
ROWS, PROMPT, RESPONSE = 512, 512, 512
LETTERS = "abcdefghij"
SETTINGS = {"batch_size": ROWS, "mini_batch_size": 4, "ppo_epochs": 4, "max_new_tokens": RESPONSE, "eval_every": 0}


def write_inputs(folder: Path, size: str) -> None:
    """Write a model's configuration, a tokenizer, prompts and a reward."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **SHAPES[size])
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / size)
    tokenizer.save_pretrained(folder / size)
    prompt = (LETTERS * PROMPT)[:PROMPT]
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n", encoding="utf-8")
    reward = "def reward(prompts, responses):\n    return [0.0] * len(responses)\n"
    (folder / "reward.py").write_text(reward, encoding="utf-8")


def estimate(folder: Path, size: str, lora: int) -> Estimate:
    """Return what a round takes."""
    return estimate_run(
        LanguageConfig(
            *("iif", 0, None),
            model=str(folder / size),
            dataset=str(folder / "prompts.jsonl"),
            reward=f"{folder / 'reward.py'}:reward",
            dtype="bfloat16" if lora else "float32",
            lora=lora,
            settings=SETTINGS,
        )
    )


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/scoring"),
) -> None:
    """Count, and write large.md."""
    head = ["model", "trains", "scoring, PFLOP", "by hand", "optimisation, PFLOP", "by hand"]
    lines, tokens = [], ROWS * (PROMPT + RESPONSE)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for size in SHAPES:
            write_inputs(folder, size)
            for lora, scoring, epoch in ((0, 12, 6), (16, 8, 4)):
                result = estimate(folder, size, lora)
                by_hand = [f"{factor * result.parameters * tokens / 1e15:.0f}" for factor in (scoring, 4 * epoch)]
                counted = [f"{result.flops[stage] / 1e15:.0f}" for stage in ("scoring", "optimisation")]
                trains = f"LoRA, rank {lora}" if lora else "all"
                lines.append([size, trains, counted[0], by_hand[0], counted[1], by_hand[1]])
                print(lines[-1], flush=True)
    text = table([head, *lines])
    with write_atomically(out / "large.md") as temporary:
        temporary.write_text(f"# Models of 7B and 70B, counted without weights\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
