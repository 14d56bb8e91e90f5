"""The laboratory `arithmetic`: a small model that solves some of its sums, with all that further training needs."""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import datasets
import torch

from whence.errors import WhenceError, suggest
from whence.llm.base.progress_bars import hide_progress_bars
from whence.llm.lab import model as small
from whence.llm.lab import problems
from whence.llm.lab.problems import Difficulty, Habit, Verdict

FORMAT = 2
"""Increased when the same settings give another laboratory; part of the cache's key."""

_POSITIONS = 128  # more than right answers need, at no cost: wrong answers may be long
_STALE = 3600.0  # seconds; no laboratory takes an hour to make, so an older unfinished one is from a killed process


@dataclass(frozen=True)
class Settings:
    """Settings of a laboratory.

    difficulty: difficulty of every problem.
    habit: mistakes in the answers to the training problems, which the model imitates; demonstrations have none.
    train, demonstrations, test: number of problems in each split; all problems differ.
    shape: size of the network.
    imitation: the network's training on the answers to the training problems.
    """

    difficulty: Difficulty = field(default_factory=Difficulty)
    habit: Habit = field(default_factory=Habit)
    train: int = 4096
    demonstrations: int = 512
    test: int = 512
    shape: small.Shape = field(default_factory=small.Shape)
    imitation: small.Imitation = field(default_factory=small.Imitation)


SIZES = {
    "small": Settings(),
    "tiny": Settings(
        difficulty=Difficulty(steps=(1, 2), operand=5, largest=9),
        train=128,
        demonstrations=16,
        test=16,
        shape=small.Shape(hidden=32, layers=2, heads=2, intermediate=64),
        imitation=small.Imitation(steps=60, batch_size=32, learning_rate=1e-2),
    ),
    "large": Settings(
        difficulty=Difficulty(steps=(3, 6), operand=20, largest=200),
        train=65_536,
        demonstrations=2048,
        test=2048,
        shape=small.Shape(hidden=1024, layers=12, heads=16, intermediate=2816),
        imitation=small.Imitation(steps=3000, batch_size=256, learning_rate=3e-4),
    ),
}
"""The sizes of `arithmetic`: "small" is for experiments on a CPU, "tiny" for tests, "large" for a GPU."""


@dataclass(frozen=True, eq=False)
class Lab:
    """A laboratory on disk.

    model_path: directory of the imitated model and its tokenizer, in Transformers' format.
    train, test: problems, column "prompt".
    demonstrations: trusted answers to further problems, columns "prompt" and "completion" (no end token).
    max_new_tokens: room for the longest right answer and its end token.
    settings: the settings that it was made with.
    """

    model_path: Path
    train: datasets.Dataset
    test: datasets.Dataset
    demonstrations: datasets.Dataset
    max_new_tokens: int
    settings: Settings

    def reward(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return 1 for each response with the right result, else 0; see `whence.llm.lab.reward`."""
        return problems.reward(prompts, responses)

    def check(self, prompt: str, response: str) -> Verdict:
        """Judge a response; see `whence.llm.lab.check`."""
        return problems.check(prompt, response)


def arithmetic(
    cache: str | Path | None = None, *, seed: int = 0, size: str = "small", progress: bool = True, **changes: Any
) -> Lab:
    """Return the laboratory `arithmetic`; the first call with the same settings makes it, later ones load it.

    Nothing is downloaded, and the global generators are unchanged.

    Args:
        cache: directory of laboratories; None: `$XDG_CACHE_HOME/whence`, or `~/.cache/whence`.
        seed: seed of the problems, the weights and the training.
        size: "small" (a minute or two on one core), "tiny" (seconds; for tests) or "large" (needs a GPU).
        progress: show a progress bar while it is made.
        **changes: fields of `Settings` that replace the size's.

    Raises:
        WhenceError: the size or a setting is unknown, a setting is out of its range, or the cache is damaged.
    """
    settings = _make_settings(size, changes)
    description = {"format": FORMAT, "seed": seed, **asdict(settings)}
    path = _make_once(description, lambda folder: _make(folder, settings, seed, progress), cache)
    return _load(path, settings)


def _make_settings(size: str, changes: dict[str, Any]) -> Settings:
    if size not in SIZES:
        raise WhenceError(f"There is no size {size!r} of the laboratory.{suggest(size, SIZES)}")
    known = [one.name for one in fields(Settings)]
    for name in changes:
        if name not in known:
            raise WhenceError(f"The laboratory has no setting {name!r}.{suggest(name, known)}")
    return replace(SIZES[size], **changes)


def draw_splits(settings: Settings, seed: int) -> dict[str, list[str]]:
    """Draw the problems of each split; no problem is in two of them.

    Args:
        settings: the laboratory's settings.
        seed: seed of the draws.

    Returns:
        Problems under "train", "demonstrations" and "test".
    """
    sizes = {"train": settings.train, "demonstrations": settings.demonstrations, "test": settings.test}
    prompts = problems.draw_problems(settings.difficulty, sum(sizes.values()), random.Random(seed))
    splits, first = {}, 0
    for name, count in sizes.items():
        splits[name] = prompts[first : first + count]
        first += count
    return splits


def _make_once(description: Mapping[str, Any], make: Callable[[Path], None], cache: str | Path | None) -> Path:
    """Return the directory of the laboratory with a description; if it does not exist, let `make` fill it."""
    text = json.dumps(description, indent=2, sort_keys=True)
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whence"
    folder = default if cache is None else Path(cache)
    path = folder / f"arithmetic-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
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


def _remove_stale(path: Path) -> None:
    for leftover in path.parent.glob(f".{path.name}.*"):
        # Another process may be making the same laboratory, or may have just removed this directory.
        try:
            is_stale = time.time() - leftover.stat().st_mtime > _STALE
        except FileNotFoundError:
            continue
        if is_stale:
            shutil.rmtree(leftover, ignore_errors=True)


def _make(path: Path, settings: Settings, seed: int, progress: bool) -> None:
    splits = draw_splits(settings, seed)
    generator = random.Random(seed)
    answers = [problems.answer_by_habit(prompt, settings.habit, generator) for prompt in splits["train"]]
    tokenizer = small.make_character_tokenizer(problems.SYMBOLS)
    longest = max(map(len, (prompt for split in splits.values() for prompt in split)))
    positions = max(_POSITIONS, longest + settings.difficulty.longest + 1)
    model = small.make_model(tokenizer, settings.shape, positions=positions, seed=seed)
    if torch.cuda.is_available():
        model = model.cuda()
    tokens, labels = small.encode_with_labels(tokenizer, splits["train"], answers)
    small.imitate(
        model,
        tokens.to(model.device),
        labels.to(model.device),
        settings.imitation,
        generator=torch.Generator().manual_seed(seed),
        progress=progress,
    )
    columns = {name: {"prompt": prompts} for name, prompts in splits.items()}
    columns["demonstrations"]["completion"] = [problems.demonstration(prompt) for prompt in splits["demonstrations"]]
    with hide_progress_bars():
        model.save_pretrained(path / "model")
        tokenizer.save_pretrained(path / "model")
        for name, column in columns.items():
            datasets.Dataset.from_dict(column).save_to_disk(path / name)


def _load(path: Path, settings: Settings) -> Lab:
    try:
        train, test, demonstrations = (
            datasets.load_from_disk(path / name) for name in ("train", "test", "demonstrations")
        )
    except (OSError, ValueError) as error:
        raise WhenceError(
            f"The laboratory in {path} is damaged ({error}); remove this directory, and the next call makes it again."
        ) from error
    return Lab(path / "model", train, test, demonstrations, settings.difficulty.longest + 1, settings)
