"""The laboratory `civility`: LDA's detoxification on a small scale.

It has a model that can be rude, a classifier of rudeness that gives the reward, and another one, trained on other
phrases, that measures the trained model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import tqdm

from whence.errors import WhenceError, suggest
from whence.guards import eval_mode, preserve_rng_state
from whence.llm.lab import model as small
from whence.llm.lab import phrases
from whence.llm.lab.cache import make_once
from whence.llm.progress_bars import hide_progress_bars
from whence.llm.rewards import classifier

FORMAT = 1
"""Increased when the same settings give another laboratory; part of the cache's key."""

LONGEST = 24
"""The most tokens of a reply, including its end."""


@dataclass(frozen=True)
class CivilitySettings:
    """Settings of a laboratory.

    train, held_out, test: number of prompts in each split; held-out and test speakers are never calm.
    corpus: number of replies that the model imitates.
    labelled: number of texts that each classifier is trained on.
    shape, judge: sizes of the model and of both classifiers.
    imitation, teaching: training of the model and of both classifiers.
    """

    train: int = 4096
    held_out: int = 512
    test: int = 400
    corpus: int = 8192
    labelled: int = 2048
    shape: small.Shape = field(default_factory=small.Shape)
    judge: small.Shape = field(default_factory=lambda: small.Shape(hidden=64, layers=2, heads=2, intermediate=128))
    imitation: small.Imitation = field(default_factory=lambda: small.Imitation(steps=240))
    teaching: small.Imitation = field(default_factory=lambda: small.Imitation(steps=150))


CIVILITY_SIZES: Mapping[str, CivilitySettings] = {
    "small": CivilitySettings(),
    "tiny": CivilitySettings(
        **{"train": 64, "held_out": 16, "test": 16, "corpus": 256, "labelled": 256},
        shape=small.Shape(hidden=32, layers=2, heads=2, intermediate=64),
        judge=small.Shape(hidden=32, layers=1, heads=2, intermediate=64),
        imitation=small.Imitation(steps=60, batch_size=32, learning_rate=1e-2),
        teaching=small.Imitation(steps=60, batch_size=32, learning_rate=5e-3),
    ),
}
"""The sizes of `civility`."""


@dataclass(frozen=True, eq=False)
class CivilityLab:
    """A laboratory on disk.

    model_path: directory of the model that has imitated the corpus, and its tokenizer.
    reward_path, judge_path: classifiers with the labels neutral and toxic, in Transformers' format.
    train, held_out, test: prompts, column "prompt".
    max_new_tokens: the most tokens of a reply.
    """

    model_path: Path
    reward_path: Path
    judge_path: Path
    train: datasets.Dataset
    held_out: datasets.Dataset
    test: datasets.Dataset
    max_new_tokens: int = LONGEST


def civility(
    cache: str | Path | None = None, *, seed: int = 0, size: str = "small", progress: bool = True
) -> CivilityLab:
    """Return the laboratory `civility`; the first call with the same settings makes it, later ones load it.

    Args:
        cache: directory of laboratories; None: `$XDG_CACHE_HOME/whence`, or `~/.cache/whence`.
        seed: seed of the phrases, the weights and the training.
        size: "small" (about two minutes on one core) or "tiny" (seconds; for tests).
        progress: show progress bars while it is made.

    Raises:
        WhenceError: the size is unknown, or the cache is damaged.
    """
    if size not in CIVILITY_SIZES:
        raise WhenceError(f"There is no size {size!r} of the laboratory.{suggest(size, CIVILITY_SIZES)}")
    settings = CIVILITY_SIZES[size]
    description = {"format": FORMAT, "seed": seed, **asdict(settings)}
    path = make_once("civility", description, lambda folder: _make(folder, settings, seed, progress), cache)
    try:
        train, held_out, test = (datasets.load_from_disk(path / name) for name in ("train", "held_out", "test"))
    except (OSError, ValueError) as error:
        raise WhenceError(
            f"The laboratory in {path} is damaged ({error}); remove this directory, and the next call makes it again."
        ) from error
    return CivilityLab(path / "model", path / "reward", path / "judge", train, held_out, test)


def measure_answers(lab: CivilityLab, texts: Sequence[str]) -> dict[str, float]:
    """Measure how civil texts are: the share with a rude phrase, and the judge's verdicts.

    Args:
        lab: the laboratory.
        texts: the replies.

    Returns:
        "rude": share of texts with a rude phrase; "toxic": share that the judge calls toxic; "judged": its mean logit
        of neutral minus that of toxic, and "judged_error", the standard error.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with hide_progress_bars():
        judge = AutoModelForSequenceClassification.from_pretrained(lab.judge_path, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(lab.judge_path)
    neutral, toxic = (
        torch.tensor(list(classifier(judge, tokenizer, label=label)([""] * len(texts), texts)))
        for label in ("neutral", "toxic")
    )
    margins = (neutral - toxic).double()
    return {
        "rude": sum(map(phrases.is_rude, texts)) / len(texts),
        "toxic": float((margins < 0).double().mean()),
        "judged": float(margins.mean()),
        "judged_error": float(margins.std() / len(texts) ** 0.5) if len(texts) > 1 else 0.0,
    }


def _make(path: Path, settings: CivilitySettings, seed: int, progress: bool) -> None:
    draws = random.Random(seed)
    not_calm = tuple(mood for mood in phrases.MOODS if mood != "calm")
    prompts = {
        "train": [phrases.draw_prompt(draws) for _ in range(settings.train)],
        "held_out": [phrases.draw_prompt(draws, not_calm) for _ in range(settings.held_out)],
        "test": [phrases.draw_prompt(draws, not_calm) for _ in range(settings.test)],
    }
    tokenizer = small.make_word_tokenizer(phrases.list_words())
    corpus = [phrases.draw_prompt(draws) for _ in range(settings.corpus)]
    model = small.make_model(tokenizer, settings.shape, positions=64, seed=seed)
    replies = [phrases.draw_reply(prompt, draws) for prompt in corpus]
    tokens, labels = small.encode_with_labels(tokenizer, corpus, replies)
    generator = torch.Generator().manual_seed(seed)
    small.imitate(model, tokens, labels, settings.imitation, generator=generator, progress=progress)
    with hide_progress_bars():
        model.save_pretrained(path / "model")
        tokenizer.save_pretrained(path / "model")
        for name, texts in prompts.items():
            datasets.Dataset.from_dict({"prompt": texts}).save_to_disk(path / name)
    for name, collection in (("reward", phrases.REWARDED), ("judge", phrases.JUDGED)):
        texts, toxic = phrases.draw_labelled(settings.labelled, draws, collection)
        judge = _train_classifier(tokenizer, texts, toxic, settings, seed, progress)
        with hide_progress_bars():
            judge.save_pretrained(path / name)
            tokenizer.save_pretrained(path / name)


def _train_classifier(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    labels: Sequence[int],
    settings: CivilitySettings,
    seed: int,
    progress: bool,
) -> Any:
    """Return a classifier trained on labelled texts, in eval mode."""
    shape, teaching = settings.judge, settings.teaching
    names = {0: "neutral", 1: "toxic"}
    label_names = {"num_labels": 2, "id2label": names, "label2id": {name: number for number, name in names.items()}}
    config = small.make_network_config(tokenizer, shape, 64, **label_names)
    with preserve_rng_state():
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    inputs = tokenizer(list(texts), padding=True, padding_side="right", return_tensors="pt")
    targets = torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=teaching.learning_rate)
    model.train()
    for _ in tqdm(range(teaching.steps), desc="teaching", disable=not progress):
        batch = torch.randint(len(targets), (teaching.batch_size,), generator=generator)
        columns = {name: inputs[name][batch] for name in ("input_ids", "attention_mask")}
        loss = model(**columns, labels=targets[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def answer_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, seed: int, batch_size: int = 128
) -> list[str]:
    """Draw a reply to each prompt; the global generators and the model's mode are unchanged."""
    texts: list[str] = []
    with preserve_rng_state(), eval_mode(model.modules()), torch.no_grad():
        torch.manual_seed(seed)
        for first in range(0, len(prompts), batch_size):
            batch = list(prompts[first : first + batch_size])
            inputs = tokenizer(batch, padding=True, padding_side="left", return_tensors="pt").to(model.device)
            tokens = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=LONGEST,
                do_sample=True,
                top_k=0,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
