"""The data and the reward of I-PPO's training of a 1B model on GSM8K.

    python examples/gsm8k.py data/gsm8k    # sft/train.jsonl, train.jsonl, trusted.jsonl and test.jsonl

results/llm/README.md has the commands that train on these files. The reward is `examples/gsm8k.py:right`.
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
    """Return 1 for each response that ends with the number in the column `answer`, else 0."""
    results, expected = map(_find_number, responses), (_find_number(f"#### {number}") for number in answer)
    return [float(result is not None and result == number) for result, number in zip(results, expected, strict=True)]


def _find_number(text: str) -> str | None:
    """Return the number after the last ####, without separators; None if there is none."""
    numbers = ANSWER.findall(text)
    return numbers[-1].replace(",", "").removesuffix(".0") if numbers else None


def main(
    folder: Annotated[Path, typer.Argument(help="Where the files go.")],
    dataset: Annotated[
        str, typer.Option(help="Directory or id, with the columns question and answer.")
    ] = "openai/gsm8k",
    trusted: Annotated[int, typer.Option(min=1, help="Problems whose solutions the scores use.")] = 512,
) -> None:
    """Write problems to imitate, to train on, to trust and to test on, as JSON lines."""
    loaded = datasets.load_dataset(dataset, *(["main"] if dataset == "openai/gsm8k" else []))
    train = [_example(row) for row in loaded["train"].shuffle(seed=0)]
    if trusted >= len(train):
        raise typer.BadParameter(f"--trusted is {trusted}, and there are {len(train)} problems in all.")
    demonstrations, train = train[:trusted], train[trusted:]
    solutions = [{"prompt": row["prompt"], "completion": row["completion"]} for row in train]
    _write(folder / "sft" / "train.jsonl", solutions)  # the model imitates these before
    _write(folder / "train.jsonl", [{"prompt": row["prompt"], "answer": row["answer"]} for row in train])
    _write(
        folder / "trusted.jsonl", [{"prompt": row["prompt"], "completion": row["completion"]} for row in demonstrations]
    )
    test = [_example(row) for row in loaded["test"]]
    _write(folder / "test.jsonl", [{"prompt": row["prompt"], "answer": row["answer"]} for row in test])


def _example(row: Mapping[str, Any]) -> dict[str, str | None]:
    """Return a problem as prompt and completion, without the calculator's notes, <<1+1=2>>."""
    solution = re.sub(r"<<.*?>>", "", row["answer"])
    prompt = f"Question: {row['question'].strip()}\nAnswer:"
    return {"prompt": prompt, "completion": f" {solution}", "answer": _find_number(row["answer"])}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
