"""Whether choosing responses helps a pretrained model: GRPO on SmolLM2-135M, with each rule.

Run: `python -m studies.selection.pretrained results/selection [--only three] [--workers 2]`, with the extra `lab`. Each
run trains an adapter for some rounds of 32 responses to four puzzles, with clean rewards, or with the ranks of the
rewards reversed in a fifth of the groups (as DTV's study did). No puzzle trains twice, so that the clean rewards of a
round are a measurement, too. Every few rounds an answer to each of some further puzzles is drawn:

- reward: that of these answers;
- divergence: from the start model, KL(trained | start) of the next token, averaged over these answers' tokens.

`three` are all arms with three seeds. Those that look best go on with five seeds that nothing was chosen by, `five`,
beside `none` and `random`. A finished run is not trained again.
"""

import multiprocessing
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import trl.trainer.utils
import typer
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from rich.console import Console
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import TrainerCallback
from trl import GRPOConfig

from studies.selection.tables import KEYS, write_tables
from studies.stored import round_numbers, write_line
from whence import DTV, IPPO, AdvantageMagnitude, MaxVariance, NonPositive, RandomDrop, ZeroVariance
from whence.core import eval_mode
from whence.lab import read_rows
from whence.lab.language import Lab, smollm2
from whence.llm import PPOConfig, ValidationLoss
from whence.llm.base import ignore_old_names
from whence.llm.text import context_length, generate, read_prompts
from whence.llm.trl import InfluenceGRPOTrainer
from whence.stored.language.loading import hide_progress_bars, load_language_model

PUZZLE, TRAINED, TESTED, SAMPLING, ROUNDS, EVERY = "basic_arithmetic", 128, 96, 0, 16, 4
GROUPS, GROUP, REVERSED = 4, 8, 0.2
RATE, RANK = 4e-4, 16
ARMS = {
    "none": lambda seed: None,
    "random": lambda seed: RandomDrop(seed=seed, like=MaxVariance(GROUP // 2)),
    "zero-variance": lambda seed: ZeroVariance(),
    "max-variance": lambda seed: MaxVariance(GROUP // 2),
    "advantage-magnitude": lambda seed: AdvantageMagnitude(0.5),
    "iif": lambda seed: NonPositive(),
    "ippo": lambda seed: IPPO(),
    "ippo-unweighted": lambda seed: IPPO(weighted=False),
    "dtv": lambda seed: DTV(),
    "dtv-loo": lambda seed: DTV(leave_one_out=True),
}
REWARDS = ("clean", "reversed")
SEEDS = {"tuning": range(90, 92), "three": range(3), "five": range(10, 15)}
BEST = ("max-variance", "advantage-magnitude")
"""The arms that looked best with the three seeds: highest at as many seconds, in the mean of clean and reversed."""


def split(lab: Lab, seed: int) -> tuple[Dataset, Dataset]:
    """Return the puzzles that train, of which a fifth is marked, and those that measure."""
    puzzles = concatenate_datasets([lab.test, lab.train]).remove_columns("completion")
    marks = np.zeros(TRAINED, dtype=bool)
    marks[np.random.default_rng(seed).permutation(TRAINED)[: round(REVERSED * TRAINED)]] = True
    train = puzzles.select(range(TESTED, TESTED + TRAINED)).add_column("marked", marks.tolist())
    return train, puzzles.select(range(TESTED))


def make_reward(lab: Lab, reverses: bool, clean: list[float]) -> Any:
    """Return the laboratory's reward as TRL calls it; those of marked puzzles may be reversed.

    Of every batch, the mean of the clean rewards is added to `clean`.
    """

    def reward(prompts: Any, completions: Any, answer: Any, marked: Any, **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        values = lab.reward(texts, texts, answer=answer)
        clean.append(sum(values) / len(values))
        return [1 - value if mark and reverses else value for value, mark in zip(values, marked, strict=True)]

    return reward


def measure(model: Any, tokenizer: Any, lab: Lab, test: Dataset) -> dict[str, float]:
    """Return the reward of a sampled response to each puzzle, and how far a response's tokens are from the start's."""
    config = PPOConfig("out/selection", max_new_tokens=lab.max_new_tokens, generation_batch_size=len(test))
    with torch.random.fork_rng(), torch.no_grad(), eval_mode(model.modules()):
        torch.manual_seed(SAMPLING)
        ids = read_prompts(test, tokenizer, config, context_length(model)).ids
        responses = generate(model, tokenizer, ids, config)
        rewards = lab.reward(responses.texts, responses.texts, answer=test["answer"])
        mask, length = responses.response_mask, responses.response_mask.shape[1]

        def read() -> Tensor:
            """Return the log-probs of all next tokens at the responses' tokens, (tokens, vocabulary)."""
            inputs = {"input_ids": responses.input_ids, "attention_mask": responses.attention_mask}
            hidden = model.get_base_model().model(**inputs).last_hidden_state[:, -length - 1 : -1]
            return log_softmax(model.get_output_embeddings()(hidden[mask]).float(), -1)

        trained = read()
        with model.disable_adapter():
            divergence = (trained.exp() * (trained - read())).sum(-1)
    return {"reward": sum(rewards) / len(rewards), "divergence": float(divergence.mean())}


class Measurements(TrainerCallback):
    """Measures after some rounds; a round is a step."""

    def __init__(self, measure: Callable[[], dict[str, float]], rounds: Collection[int]) -> None:
        self.measure, self.rounds = measure, rounds
        self.points: list[dict[str, float]] = []
        self.seconds, self.begun = 0.0, time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the start."""
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add a point; `seconds` are the process's, without measurements."""
        if state.global_step in self.rounds:
            self.seconds += time.process_time() - self.begun
            self.points.append({"round": state.global_step, "seconds": self.seconds, **self.measure()})
            self.begun = time.process_time()


def train(arm: str, rewards: str, seed: int, rounds: int = ROUNDS, rate: float = RATE) -> dict[str, Any]:
    """Train an arm; return its points, each round's clean reward, the mean share kept, and CPU seconds by stage."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # the adapter's start
    lab = smollm2(PUZZLE)
    with hide_progress_bars():
        model, tokenizer = load_language_model(str(lab.model_path), "bfloat16")
    # Both are as on a GPU. The layer's input is a slice, for which PyTorch on a CPU copies the weight once a row; and
    # TRL's layer reads the tokens of prompts, too.
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    trl.trainer.utils._use_triton = lambda device: True
    puzzles, test = split(lab, seed)
    config = GRPOConfig(
        "out/selection",
        max_steps=rounds,
        per_device_train_batch_size=GROUPS * GROUP,
        num_generations=GROUP,
        max_completion_length=lab.max_new_tokens,
        learning_rate=rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clean: list[float] = []
    target = {"target": ValidationLoss.of(lab.demonstrations, tokenizer)} if arm.startswith("ippo") else {}
    with ignore_old_names():
        trainer = InfluenceGRPOTrainer(
            model,
            make_reward(lab, rewards == "reversed", clean),
            args=config,
            train_dataset=puzzles,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK),
            rule=ARMS[arm](seed),
            **target,
        )
        # Those of training on everything are what other arms are compared with at their divergences and seconds.
        measured = range(0, rounds + 1, EVERY) if arm == "none" else (rounds,)
        measurements = Measurements(partial(measure, trainer.model, tokenizer, lab, test), measured)
        trainer.add_callback(measurements)
        trainer.train()
    # TRL logs once, at the end, the mean over rounds, and empties its own list.
    logs = trainer.state.log_history
    shares = [log["influence/kept_share"] for log in logs if "influence/kept_share" in log]
    stages = {name: clocks["cpu"] for name, clocks in trainer.seconds.items()}
    return {"points": measurements.points, "clean": clean, "kept": shares, "stages": stages}


def run(part: str, arm: str, rewards: str, seed: int, out: Path) -> None:
    """Train, and write a line."""
    row = {"part": part, "arm": arm, "rewards": rewards, "seed": seed}
    write_line(out / "pretrained.parquet", round_numbers({**row, **train(arm, rewards, seed)}), KEYS)
    Console(stderr=True).print(f"{part}, {arm}, {rewards}, seed {seed}")


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    only: Annotated[str, typer.Option(help="three or five; none: both.")] = "",
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
) -> None:
    """Train what is not there yet, seed by seed, and write tables.md."""
    arms = {"three": tuple(ARMS), "five": ("none", "random", *BEST)}
    stored = read_rows(out / "pretrained.parquet", KEYS)
    jobs = [
        (part, arm, rewards, seed)
        for part in arms
        if only in part
        for seed in SEEDS[part]
        for rewards in REWARDS
        for arm in arms[part]
        if (part, arm, rewards, seed) not in stored
    ]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for begun in [pool.submit(run, *job, out) for job in jobs]:
            begun.result()
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
