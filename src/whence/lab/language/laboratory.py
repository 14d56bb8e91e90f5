"""The laboratory `arithmetic`: a small model that solves some of its sums, with all that further training needs."""

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from jaxtyping import Int64
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import tqdm

from whence.core import WhenceError, preserve_rng_state, suggest
from whence.lab.language import problems
from whence.lab.language.problems import Difficulty, Habit
from whence.llm.text import Reward
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
    """Return a tokenizer with one token per character; it pads on the left and adds no special token.

    Args:
        symbols: every character that has a token; others become `<unk>`.
    """
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
