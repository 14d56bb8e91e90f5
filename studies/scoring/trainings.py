"""Trainings of a round or two, by PPOTrainer and by TRL's GRPO, with the seconds of their stages."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import polars as pl
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from studies.benchmarks.language import PROMPT, RESPONSE, VOCABULARY, make_language_model, write_sums
from whence import Influence, Progress, RecordBatch, Selection
from whence.core import argsort_ascending
from whence.llm import PPOConfig, PPOTrainer
from whence.llm.trl import InfluenceGRPOTrainer
from whence.selection import read_scores

ROWS, GENERATIONS = 64, 8
"""Of a round, and of each of GRPO's prompts."""

ROUNDS = 2
"""Of a training. In the first one, choosing in the step knows no target yet; the last one counts.

The learning rate is 0, so that all trainings draw the same responses.
"""

STAGES = ("generation", "forward", "scoring", "optimisation")


@dataclass(frozen=True)
class DropLowest:
    """Drops a share of the scored rows, the lowest ones, so that the number of dropped rows is known."""

    share: float
    needs_influence = True

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Drop the lowest."""
        scores = read_scores(records, influence)
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[argsort_ascending(scores, records.ids.cpu())[: round(self.share * len(records))]] = False
        return Selection.dropping(keep, "among the lowest")


@dataclass(frozen=True)
class Way:
    """How a training chooses: `select` as of the trainers, or None: it does not; and the share that it drops."""

    name: str
    select: str | None = None
    share: float = 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a trainer of whence."""
        return {} if self.select is None else {"rule": DropLowest(self.share), "select": self.select}


WAYS = (
    Way("plain"),
    *(Way(f"{name}, {share:g}", name, share) for name in ("before", "in_step") for share in (0, 0.5, 0.75)),
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the letters of `VOCABULARY`; its last letter ends a text."""
    backend = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(VOCABULARY)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=VOCABULARY[-1], pad_token=VOCABULARY[-1])


def write_prompts() -> list[str]:
    """Return prompts, each the beginning of a sum."""
    ids = write_sums(ROWS, torch.Generator().manual_seed(3))[:, : PROMPT // 2].tolist()
    return ["".join(VOCABULARY[number] for number in row) for row in ids]


def make_model(size: str) -> Any:
    """Return a model of the benchmarks that draws responses of any length."""
    model: Any = make_language_model(f"gpt-{size}").train()
    last = VOCABULARY.index(VOCABULARY[-1])
    model.config.eos_token_id = model.config.pad_token_id = last
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = last
    return model


def count_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return a reward for each completion: the share of its letters that are digits."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def train_ppo(size: str, batch: int, epochs: int, way: Way, device: str) -> dict[str, float]:
    """Return the CPU seconds of the stages of the last round of PPO in minibatches of `batch` rows."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"batch_size": ROWS, "mini_batch_size": batch, "generation_batch_size": ROWS, "rounds": ROUNDS}
        plain = {"learning_rate": 0.0, "disable_tqdm": True, "save_every": 0, "eval_every": 0}
        config = PPOConfig(folder, ppo_epochs=epochs, max_new_tokens=RESPONSE, **sizes, **plain)
        tokenizer = make_tokenizer()
        PPOTrainer(config, make_model(size), tokenizer, count_digits, write_prompts(), **way.arguments).train()
        seconds = pl.read_parquet(Path(folder) / "timings.parquet").row(-1, named=True)
    clock = "cpu" if device == "cpu" else "wall"
    return {stage: seconds.get(f"{stage}_{clock}") or 0.0 for stage in STAGES}


class _Clocked:
    """Notes the seconds of a trainer's generation and of its training steps, by batch of completions."""

    clock: Callable[[], float] = staticmethod(time.process_time)
    nested = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = self.clock()
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.nested += (took := self.clock() - start)
        self.batches.append({"generation": took, "optimisation": 0.0})  # type: ignore[attr-defined]
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        start, self.nested = self.clock(), 0.0
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.batches[-1]["optimisation"] += self.clock() - start - self.nested  # type: ignore[attr-defined]
        return loss


def train_grpo(
    size: str, batch: int, epochs: int, way: Way, device: str, *, checkpointing: bool = True
) -> dict[str, float]:
    """Return the CPU seconds of the last batch of completions of TRL's GRPO, in passes of `batch` rows.

    Gradient checkpointing is TRL's default.
    """
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": ROWS // batch}
        sizes |= {"num_generations": GENERATIONS, "num_iterations": epochs, "max_completion_length": RESPONSE}
        plain = {"bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        plain |= {"learning_rate": 0.0, "use_cpu": device == "cpu", "max_steps": ROUNDS * epochs}
        args = GRPOConfig(folder, gradient_checkpointing=checkpointing, **sizes, **plain)
        trainer_class = GRPOTrainer if way.select is None else InfluenceGRPOTrainer
        trainer = type("ClockedGRPO", (_Clocked, trainer_class), {})(
            model=make_model(size),
            reward_funcs=count_digits,
            args=args,
            train_dataset=datasets.Dataset.from_dict({"prompt": write_prompts()}),
            processing_class=make_tokenizer(),
            **way.arguments,
        )
        trainer.batches = []
        trainer.clock = time.process_time if device == "cpu" else time.perf_counter
        trainer.train()
    # TRL draws and rewards completions in one call, in which scores before the steps are made, too.
    return {stage: trainer.batches[-1].get(stage, 0.0) for stage in STAGES}
