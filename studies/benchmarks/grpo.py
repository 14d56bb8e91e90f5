"""The suite's GRPO: TRL's trainer and whence's on the smallest language model, two trainings of each in turns."""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from studies.benchmarks.cells import Result, Setting
from studies.benchmarks.language import PROMPT, RESPONSE, VOCABULARY, make_language_model, write_sums
from studies.benchmarks.timing import spread, spread_stages
from whence import Influence, NonPositive, Progress, RecordBatch, Selection, SelectionRule
from whence.llm.trl import InfluenceGRPOTrainer

COMPLETIONS, GENERATIONS = 32, 8
"""Of a GRPO round, and of each of its prompts."""

ITERATIONS = 4
"""Steps on a round's completions where kept rows are timed; all but the first of them neither draw nor score."""


@dataclass(frozen=True)
class KeepFirst:
    """Keeps the first completions, without scores."""

    share: float
    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Keep the first share."""
        return Selection.dropping(torch.arange(len(records)) < self.share * len(records), "not among the first")


class StepClock(TrainerCallback):
    """Notes the seconds of each step of a trainer, and of scoring in it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.read_scoring: Any = lambda: 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        self._start, self._scored = time.perf_counter(), self.read_scoring()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the step."""
        seconds = time.perf_counter() - self._start
        self.steps.append({"round": seconds, "scoring": self.read_scoring() - self._scored})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the letters of `VOCABULARY`; its last letter ends a text."""
    backend = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(VOCABULARY)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=VOCABULARY[-1], pad_token=VOCABULARY[-1])


def count_digits(completions: list[str], **columns: Any) -> list[float]:
    """Return a reward for each completion: the share of its letters that are digits."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


def make_grpo(
    rule: SelectionRule | None, folder: str, setting: Setting, arguments: Mapping[str, Any]
) -> tuple[Any, StepClock]:
    """Return a trainer of the suite's smallest language model: whence's with a rule, TRL's without."""
    clock = StepClock()
    ids = write_sums(64, torch.Generator().manual_seed(3))[:, : PROMPT // 2].tolist()
    prompts = ["".join(VOCABULARY[number] for number in row) for row in ids]
    model: Any = make_language_model("gpt-1M").train()
    last = VOCABULARY.index(VOCABULARY[-1])
    model.config.eos_token_id = model.config.pad_token_id = last
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = last
    args = GRPOConfig(
        folder,
        per_device_train_batch_size=COMPLETIONS,
        num_generations=GENERATIONS,
        max_completion_length=RESPONSE,
        learning_rate=1e-5,
        use_cpu=setting.device == "cpu",
        **{"bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"},
        **arguments,
    )
    settings = {
        "model": model,
        "reward_funcs": count_digits,
        "args": args,
        "train_dataset": datasets.Dataset.from_dict({"prompt": prompts}),
        "processing_class": make_tokenizer(),
        "callbacks": [clock],
    }
    if rule is None:
        return GRPOTrainer(**settings), clock
    trainer = InfluenceGRPOTrainer(rule=rule, **settings)
    clock.read_scoring = lambda: trainer.seconds.get("scoring", {}).get("wall", 0.0)
    return trainer, clock


def train_in_turns(
    rules: Mapping[str, SelectionRule | None], setting: Setting, **arguments: Any
) -> dict[str, list[list[dict[str, float]]]]:
    """Return the steps of two trainings by each rule."""
    trainings: dict[str, list[list[dict[str, float]]]] = {name: [] for name in rules}
    for _ in range(2):
        for name, rule in rules.items():
            with tempfile.TemporaryDirectory() as folder:
                trainer, clock = make_grpo(rule, folder, setting, arguments)
                trainer.train()
            trainings[name].append(clock.steps)
    return trainings


def measure_trainers(setting: Setting) -> Result:
    """Return the seconds of a step of TRL's GRPO and of whence's, and scoring's share; two trainings of each."""
    trainings = train_in_turns({"TRL": None, "whence": NonPositive()}, setting, max_steps=setting.repeats + 1)
    steps = {kind: [step for training in each for step in training[1:] or training] for kind, each in trainings.items()}
    median = statistics.median([step["round"] for step in steps["TRL"]])
    return {
        "records": COMPLETIONS,
        "stages": {kind: spread_stages(each) for kind, each in steps.items()},
        "seconds": spread([step["round"] for step in steps["whence"]]),
        "rounds_per_second": {
            kind: 1 / statistics.median([step["round"] for step in each]) for kind, each in steps.items()
        },
        "ratio": spread([step["round"] / median for step in steps["whence"]]),
        "share": spread([step["scoring"] / step["round"] for step in steps["whence"]]),
    }


def measure_kept(share: float, setting: Setting) -> Result:
    """Return the seconds of a step that neither draws nor scores, of TRL's GRPO and of whence's on a share of rows."""
    rules = {"TRL": None, f"whence, {share:.0%} kept": KeepFirst(share)}
    rounds = max(2, setting.repeats)
    trainings = train_in_turns(rules, setting, max_steps=ITERATIONS * rounds, num_iterations=ITERATIONS)
    plain, kept = (
        [step for training in each for place, step in enumerate(training) if place >= ITERATIONS and place % ITERATIONS]
        for each in trainings.values()
    )
    median = statistics.median([step["round"] for step in plain])
    return {
        "records": COMPLETIONS,
        "stages": {
            name: {"round": spread([step["round"] for step in steps])}
            for name, steps in zip(rules, (plain, kept), strict=True)
        },
        "seconds": spread([step["round"] for step in kept]),
        "ratio": spread([step["round"] / median for step in kept]),
    }
