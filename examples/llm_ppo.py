"""PPO on a language model with whence's PPOTrainer, training on the responses that help.

    python examples/llm_ppo.py                       # a small model that gets sums wrong by habit
    python examples/llm_ppo.py --rule none           # the same, trained on every response
    python examples/llm_ppo.py --rule ippo --lora 8  # scores by trusted demonstrations; trains an adapter

Replace the laboratory by your own model (a directory or id), prompts, reward and, for I-PPO, demonstrations.
"""

from typing import Annotated

import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from whence import IPPO, NonPositive
from whence.lab.language import arithmetic, evaluate
from whence.llm import PPOConfig, PPOTrainer, SequenceReturn, ValidationLoss

RULES = {"none": None, "iif": NonPositive(), "ippo": IPPO()}
"""Train on every response; on those that score above 0; on the same, weighted by their scores."""


def main(
    rule: Annotated[str, typer.Option(help=f"{', '.join(RULES)}.")] = "iif",
    rounds: Annotated[int, typer.Option(min=1, help="Rollouts to train on.")] = 20,
    size: Annotated[str, typer.Option(help="Size of the laboratory: small, or tiny for a quick try.")] = "small",
    lora: Annotated[int, typer.Option(min=0, help="Rank of an adapter to train; 0: the whole model trains.")] = 0,
    output: Annotated[str, typer.Option(help="The run's directory, for `whence report`.")] = "runs/llm_ppo",
) -> None:
    """Train, and print how many answers are right before and after."""
    if rule not in RULES:
        raise typer.BadParameter(f"{rule} is unknown; take one of {', '.join(RULES)}.")
    lab = arithmetic(size=size)
    model = AutoModelForCausalLM.from_pretrained(lab.model_path)
    tokenizer = AutoTokenizer.from_pretrained(lab.model_path)
    if lora:
        model = get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    config = PPOConfig(
        output,
        rounds=rounds,
        batch_size=256 if size == "small" else 32,
        mini_batch_size=64 if size == "small" else 16,
        learning_rate=1e-3 if lora else 5e-5,
        value_learning_rate=1e-2,
        init_kl_coef=0.0,  # the model has to unlearn its habit
        adap_kl_ctrl=False,
        max_new_tokens=lab.max_new_tokens,
        generation_batch_size=256,
    )
    trainer = PPOTrainer(
        config,
        model,
        tokenizer,
        lab.reward,
        lab.train,
        rule=RULES[rule],
        target=ValidationLoss.of(lab.demonstrations, tokenizer) if rule == "ippo" else SequenceReturn(),
    )
    test = {"samples": 1, "max_new_tokens": lab.max_new_tokens}
    before = evaluate(model, tokenizer, lab.test["prompt"], **test)
    trainer.train()
    trainer.save_model()
    after = evaluate(model, tokenizer, lab.test["prompt"], **test)
    print(f"Right answers: {before['exact_match']:.1%} before, {after['exact_match']:.1%} after {rounds} rounds.")
    print(f"Every response with its score: whence report {output}")


if __name__ == "__main__":
    typer.run(main)
