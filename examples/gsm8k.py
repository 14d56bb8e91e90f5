"""What I-PPO's training of a 1B model on GSM8K needs besides whence: the data's files, and the reward.

    python examples/gsm8k.py data/gsm8k    # sft/train.jsonl, train.jsonl, trusted.jsonl and test.jsonl

docs/llm.md has the commands that train on them. The reward is `examples/gsm8k.py:right`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
import typer

ANSWER = re.compile(r"####\s*(-?[\d,.]*\d)")


def right(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for each response that ends with the data set's answer, else 0; the column `answer` is its number."""
    given, due = map(_number, responses), (_number(f"#### {one}") for one in answer)
    return [float(one is not None and one == other) for one, other in zip(given, due, strict=True)]


def _number(text: str) -> str | None:
    """Return the number behind the last ####, without separators; None: there is none."""
    found = ANSWER.findall(text)
    return found[-1].replace(",", "").removesuffix(".0") if found else None


def main(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    dataset: Annotated[
        str, typer.Option(help="Directory or id, with the columns question and answer.")
    ] = "openai/gsm8k",
    trusted: Annotated[int, typer.Option(min=1, help="Problems whose solutions the scores are taken by.")] = 512,
) -> None:
    """Write problems to imitate, to train on, to trust and to test on, as JSON lines."""
    loaded = datasets.load_dataset(dataset, *(["main"] if dataset == "openai/gsm8k" else []))
    train = [_example(row) for row in loaded["train"].shuffle(seed=0)]
    if trusted >= len(train):
        raise typer.BadParameter(f"--trusted is {trusted}, and there are {len(train)} problems in all.")
    shown, own = train[:trusted], train[trusted:]
    solutions = [{"prompt": row["prompt"], "completion": row["completion"]} for row in own]
    _write(folder / "sft" / "train.jsonl", solutions)  # what the model imitates before
    _write(folder / "train.jsonl", [{"prompt": row["prompt"], "answer": row["answer"]} for row in own])
    _write(folder / "trusted.jsonl", [{"prompt": row["prompt"], "completion": row["completion"]} for row in shown])
    test = [_example(row) for row in loaded["test"]]
    _write(folder / "test.jsonl", [{"prompt": row["prompt"], "answer": row["answer"]} for row in test])


def _example(row: Mapping[str, Any]) -> dict[str, str | None]:
    """Return a problem as the model reads and writes it; calculators' notes, <<1+1=2>>, are left out."""
    solution = re.sub(r"<<.*?>>", "", row["answer"])
    prompt = f"Question: {row['question'].strip()}\nAnswer:"
    return {"prompt": prompt, "completion": f" {solution}", "answer": _number(row["answer"])}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
