"""GRPO with TRL, training on the completions that help: TRL's trainer, and one more argument.

    python examples/llm_grpo.py                 # a small model that gets sums wrong by habit
    python examples/llm_grpo.py --no-selection  # TRL's own training, to the bit

Replace the laboratory by your own model (a directory or id), prompts and reward. For RLOO write `RLOOConfig` and
`InfluenceRLOOTrainer`; the rest stays.
"""

from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from whence import NonPositive
from whence.lab.language import arithmetic, evaluate
from whence.llm.trl import InfluenceGRPOTrainer


def main(
    selection: Annotated[bool, typer.Option(help="Drop completions that score 0 or less, or train on all.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Generation batches to train on.")] = 10,
    size: Annotated[str, typer.Option(help="Size of the laboratory: small, or tiny for a quick try.")] = "small",
    output: Annotated[str, typer.Option(help="The run directory, and TRL's output_dir.")] = "runs/llm_grpo",
) -> None:
    """Train, and print how many answers are right before and after."""
    lab = arithmetic(size=size)
    model = AutoModelForCausalLM.from_pretrained(lab.model_path)
    tokenizer = AutoTokenizer.from_pretrained(lab.model_path)
    steps = 4  # optimiser steps on each generation batch
    config = GRPOConfig(
        output,
        max_steps=rounds * steps,
        num_iterations=steps,
        per_device_train_batch_size=64 if size == "small" else 8,
        gradient_accumulation_steps=4 if size == "small" else 2,
        num_generations=8,
        max_completion_length=lab.max_new_tokens,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,  # the model has to unlearn its habit
        logging_steps=steps,
        save_steps=steps,  # a checkpoint after each generation batch
        save_total_limit=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        log_completions=False,
    )

    def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return lab.reward(prompts, completions)

    trainer = InfluenceGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=lab.train,
        processing_class=tokenizer,
        rule=NonPositive() if selection else None,
        run=output,  # `whence report` makes a page of it
    )
    test = {"samples": 1, "max_new_tokens": lab.max_new_tokens}
    before = evaluate(model, tokenizer, lab.test["prompt"], **test)
    trainer.train(resume_from_checkpoint=trainer.find_checkpoint())  # started again, it goes on
    after = evaluate(model, tokenizer, lab.test["prompt"], **test)
    print(f"Right answers: {before['exact_match']:.1%} before, {after['exact_match']:.1%} after {rounds} rounds.")
    if trainer.selection is not None:
        kept = trainer.selection.keep
        print(f"Of the last {len(kept)} completions {int(kept.sum())} trained.")


if __name__ == "__main__":
    typer.run(main)
