"""Whether tokens' parts of scores find the wrong steps of right answers, and what they cost.

Run: `python -m studies.tokens.run results/tokens`. The laboratory `arithmetic`, made anew for each seed. Answers are
drawn before the first round of PPO and after some rounds. Among right answers, each token of a step either belongs to a
wrong step or does not. The AUROC of a number at the token is the chance that it ranks a token of a wrong step before
another token; .5 is chance. One process, one torch thread; seconds are process CPU seconds.
"""

import json
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from scipy.stats import rankdata
from transformers import AutoModelForCausalLM, AutoTokenizer

from studies.markdown import cell, table
from whence.guards import eval_mode, preserve_rng_state, write_atomically
from whence.intervals import t_interval
from whence.llm import PPOTrainer, SequenceReturn, ValidationLoss, language_view, score_tokens
from whence.llm.base.ppo_config import PPOConfig
from whence.llm.base.processes import ONE
from whence.llm.lab import arithmetic
from whence.llm.lab.problems import solution
from whence.llm.ppo.rollout import Rollout, make_rollout
from whence.llm.scores.row_scores import score
from whence.llm.text.generation import generate, split_text
from whence.stopwatch import Stopwatch

MEMORY = 2**31
"""Bytes that scoring may hold at a time, as for laboratories' runs."""

TARGETS = ("demonstrations", "return")

PREDICTORS = {
    **{f"part, {target}": "minus the token's part of the score by this target" for target in TARGETS},
    "log-prob": "minus the token's log-prob",
    "entropy": "the policy's entropy where the token was drawn",
    "advantage": "minus the token's advantage",
    "position": "the token's position in the response",
}

SIMPLE = ("log-prob", "entropy")
"""Predictors that need no scores, with which the parts are compared."""

LABELS = {
    "step": "the token's step is not the right one",
    "slip": "of the tokens after an equals sign: the equation is false",
}

POPULATIONS = ("right answers", "unfaithful right answers")
"""The second tells where in an answer the wrong step is, the first also in which answers."""


class Tokens(NamedTuple):
    """All tokens of the steps of some right answers; arrays with an entry for each.

    Attributes:
        numbers: the predictors by name, larger for tokens that are suspected more.
        labels: whether the token is wrong, by the names of `LABELS`.
        judged: whether the label is about the token, by the same names.
        unfaithful: whether its answer is.
        answers: the number of right answers, of which `unfaithful_answers` are unfaithful.
        unfaithful_answers: see above.
    """

    numbers: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    judged: dict[str, np.ndarray]
    unfaithful: np.ndarray
    answers: int
    unfaithful_answers: int


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")],
    seeds: Annotated[int, typer.Option(help="Laboratories, with seeds 0, 1, ...")] = 3,
    size: Annotated[str, typer.Option(help="Size of the laboratory.")] = "small",
    rounds: Annotated[int, typer.Option(help="Rounds of PPO before the second measurement.")] = 10,
    answers: Annotated[int, typer.Option(help="Answers that are drawn for each measurement.")] = 1024,
    cache: Annotated[Path | None, typer.Option(help="Directory of laboratories.")] = None,
) -> None:
    """Measure, and write runs.jsonl, summary.json and tables.md; a finished seed is not measured again."""
    torch.set_num_threads(1)
    settings = {"size": size, "rounds": rounds, "answers": answers}
    file = out / "runs.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    runs = [run for run in map(json.loads, lines) if run["settings"] == settings]
    for seed in sorted(set(range(seeds)) - {run["seed"] for run in runs}):
        watch, measured = Stopwatch(), measure_seed(seed, size, rounds, answers, cache)
        about = {"seed": seed, "settings": settings, "cpu_seconds": round(watch.seconds()["cpu"])}
        runs += [{**about, **run} for run in measured]
        with write_atomically(file) as temporary:
            temporary.write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    versions = {name: version(name) for name in ("torch", "transformers")}
    machine = platform.processor() or platform.machine()
    rows = summarise(runs)
    summary = {"settings": settings, "seeds": seeds, "machine": machine, "versions": versions, "summary": rows}
    with write_atomically(out / "summary.json") as temporary:
        temporary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    write_tables(rows, runs, out)


def measure_seed(seed: int, size: str, rounds: int, answers: int, cache: Path | None) -> list[dict[str, Any]]:
    """Return the measurements of one laboratory, before and after training."""
    lab = arithmetic(cache, seed=seed, size=size, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(lab.model_path)
    model = AutoModelForCausalLM.from_pretrained(lab.model_path)
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            folder,
            rounds=rounds,
            mini_batch_size=64,
            learning_rate=5e-5,
            value_learning_rate=1e-2,
            init_kl_coef=0.0,
            adap_kl_ctrl=False,
            generation_batch_size=256,
            eval_every=0,
            max_new_tokens=lab.max_new_tokens,
            disable_tqdm=True,
            seed=seed,
        )
        trainer = PPOTrainer(config, model, tokenizer, lab.reward, lab.train)
        before = measure_policy(trainer, lab, answers, seed)
        trainer.train()
        after = measure_policy(trainer, lab, answers, seed)
    return [{"rounds": number, **row} for number, row in ((0, before), (rounds, after))]


def measure_policy(trainer: PPOTrainer, lab: Any, answers: int, seed: int) -> dict[str, Any]:
    """Draw answers by the present policy, score their tokens, and return AUROCs and costs."""
    rollout = draw_answers(trainer, answers, seed)
    demonstrations = ValidationLoss.of(lab.demonstrations, trainer.tokenizer, batch_size=64)
    targets = {"demonstrations": demonstrations, "return": SequenceReturn()}
    parts, costs = {}, {}
    for name, target in targets.items():
        parts[name], costs[name] = score_both(trainer, rollout, target)
    tokens = list_step_tokens(rollout, trainer, parts)
    return {
        "right_answers": tokens.answers,
        "unfaithful_answers": tokens.unfaithful_answers,
        "auroc": {population: measure_aurocs(tokens, population) for population in POPULATIONS},
        "cost": costs,
    }


def draw_answers(trainer: PPOTrainer, count: int, seed: int) -> Rollout:
    """Return a rollout of answers to training problems, without changing the draws of training."""
    config = replace(trainer.config, batch_size=count)
    with preserve_rng_state():
        torch.manual_seed(1000 + seed)
        numbers = torch.randperm(len(trainer.prompts))[:count].tolist()
        prompts = trainer.prompts.take(numbers)
        responses = generate(trainer.model.language_model, trainer.tokenizer, prompts.ids, config)
        return make_rollout(trainer.model, trainer.reference, responses, trainer.reward, 0.0, config)


def score_both(trainer: PPOTrainer, rollout: Rollout, target: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the tokens' parts, and the seconds of scoring and of the parts: medians of three, on 256 responses."""
    shared = {"target": target, "objective": trainer.objective, "temperature": 1.0, "memory": MEMORY}
    rows = rollout.rows.take(slice(0, 256))

    def score_rows() -> object:
        return score(trainer.model, rows, engine="auto", chunk_size=64, processes=ONE, **shared)

    scoring, tokens = (time_cpu(run) for run in (score_rows, lambda: score_tokens(trainer.model, rows, **shared)))
    parts = score_tokens(trainer.model, rollout.rows, **shared)
    return parts, {"scoring": scoring, "parts": tokens, "ratio": tokens / scoring}


def time_cpu(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the median of CPU seconds."""
    run()
    seconds = []
    for _ in range(repeats):
        watch = Stopwatch()
        run()
        seconds.append(watch.seconds()["cpu"])
    return statistics.median(seconds)


def list_step_tokens(rollout: Rollout, trainer: PPOTrainer, parts: dict[str, torch.Tensor]) -> Tokens:
    """Return the tokens of the steps of all right answers."""
    outputs = evaluate_policy(trainer, rollout)
    columns = rollout.rows.observations
    mask = columns["response_mask"]
    position = torch.arange(mask.shape[1]).expand(mask.shape)
    by_row = {
        **{f"part, {name}": -part for name, part in parts.items()},
        "log-prob": -columns["log_probs"],
        "entropy": outputs,
        "advantage": -columns["advantages"],
        "position": position,
    }
    numbers: dict[str, list[float]] = {name: [] for name in by_row}
    verdicts: list[Verdict] = []
    unfaithful, right, wrong = [], 0, 0
    ids = columns["input_ids"][:, -mask.shape[1] :]
    for row, (prompt, response) in enumerate(zip(rollout.responses.prompts, rollout.responses.texts, strict=True)):
        if rollout.rewards[row] != 1:
            continue
        texts = split_text(trainer.tokenizer, ids[row][mask[row]].tolist())
        by_place = judge_characters(prompt, response)
        is_unfaithful = any(verdict.wrong_step for verdict in by_place.values())
        right, wrong = right + 1, wrong + is_unfaithful
        place = 0
        for token, text in enumerate(texts):
            if text and place in by_place:
                verdicts.append(by_place[place])
                unfaithful.append(is_unfaithful)
                for name, values in by_row.items():
                    numbers[name].append(float(values[row, token]))
            place += len(text)
    return Tokens(
        {name: np.array(values) for name, values in numbers.items()},
        {"step": np.array([v.wrong_step for v in verdicts]), "slip": np.array([v.false_equation for v in verdicts])},
        {"step": np.ones(len(verdicts), dtype=bool), "slip": np.array([v.result for v in verdicts])},
        np.array(unfaithful, dtype=bool),
        right,
        wrong,
    )


def evaluate_policy(trainer: PPOTrainer, rollout: Rollout) -> torch.Tensor:
    """Return the policy's entropy where each response token was drawn, (n, R)."""
    view, parts = language_view(trainer.model), []
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    with torch.no_grad(), eval_mode(trainer.model.modules()):
        for first in range(0, len(rollout.rows), 256):
            chunk = rollout.rows.take(slice(first, first + 256))
            parts.append(view.only({"log_prob", "entropy"}, params, view.prepare(chunk)).entropy)
    return torch.cat(parts)


class Verdict(NamedTuple):
    """Whether a character's step is not the problem's step at its place, is false by itself; and is it after "="."""

    wrong_step: bool
    false_equation: bool
    result: bool


def judge_characters(prompt: str, response: str) -> dict[int, Verdict]:
    """Return the verdict on each character of a response's steps, by its place.

    Semicolons and the result of the whole belong to no step.
    """
    right, verdicts, place = solution(prompt)[:-1], {}, 0
    for number, step in enumerate(response.split(";")[:-1]):
        is_wrong, equals = number >= len(right) or step != right[number], step.find("=")
        for at in range(len(step)):
            verdicts[place + at] = Verdict(is_wrong, not is_true(step), at > equals >= 0)
        place += len(step) + 1
    return verdicts


def is_true(step: str) -> bool:
    """Tell whether a step such as 7+8=15 holds by itself."""
    left, _, result = step.partition("=")
    try:
        return solution(f"{left}?")[-1] == result
    except ValueError:
        return False


def measure_aurocs(tokens: Tokens, population: str) -> dict[str, Any]:
    """Return the AUROC of each predictor, by label, with the share of wrong tokens."""
    everyone = tokens.unfaithful if population == POPULATIONS[1] else np.ones(len(tokens.unfaithful), dtype=bool)
    aurocs = {}
    for label, values in tokens.labels.items():
        chosen = everyone & tokens.judged[label]
        aurocs[label] = {
            "tokens": int(chosen.sum()),
            "share": float(values[chosen].mean()) if chosen.any() else None,
            **{name: compute_auroc(numbers[chosen], values[chosen]) for name, numbers in tokens.numbers.items()},
        }
    return aurocs


def compute_auroc(numbers: np.ndarray, wrong: np.ndarray) -> float | None:
    """Return the chance that a wrong token has a larger number than another one; ties count half."""
    count = int(wrong.sum())
    if count in (0, len(wrong)):
        return None
    ranks = rankdata(numbers)[wrong].sum() - count * (count + 1) / 2
    return float(ranks / (count * (len(wrong) - count)))


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return means over seeds with 95% t intervals.

    A row for each moment, population, label and predictor, and for what the first predictors have more than `SIMPLE`
    ones in the same seed; and the costs, of which a seed's is the mean over its moments.
    """
    rows = []
    for rounds in sorted({run["rounds"] for run in runs}):
        here = [run for run in runs if run["rounds"] == rounds]
        for population in POPULATIONS:
            for label in LABELS:
                cells = [run["auroc"][population][label] for run in here]
                about = {"rounds": rounds, "population": population, "label": label}
                numbers = {name: list_known(cells, name) for name in ("share", *PREDICTORS)}
                for name in (f"part, {target}" for target in TARGETS):
                    numbers |= {f"{name} − {simple}": list_known(cells, name, simple) for simple in SIMPLE}
                rows += [{**about, "number": name, **t_interval(values)} for name, values in numbers.items()]
    for target in TARGETS:
        by_seed: dict[int, list[float]] = {}
        for run in runs:
            by_seed.setdefault(run["seed"], []).append(run["cost"][target]["ratio"])
        rows.append({"number": f"cost, {target}", **t_interval([statistics.mean(each) for each in by_seed.values()])})
    return rows


def list_known(cells: list[dict[str, Any]], name: str, simple: str | None = None) -> list[float]:
    """Return a number of each cell, or its difference from another one; cells without them are left out."""
    if simple is None:
        return [cell[name] for cell in cells if cell[name] is not None]
    return [cell[name] - cell[simple] for cell in cells if cell[name] is not None and cell[simple] is not None]


def write_tables(rows: list[dict[str, Any]], runs: list[dict[str, Any]], out: Path) -> None:
    """Write tables.md: a table for each moment and population, a column for each label; and the costs."""
    parts = ["# Tokens' parts: tables\n\nWritten by `python -m studies.tokens.run results/tokens`.\n"]
    numbers = list(dict.fromkeys(row["number"] for row in rows if "label" in row))
    cells = {tuple(row.get(name) for name in ("rounds", "population", "label", "number")): row for row in rows}
    for rounds in sorted({run["rounds"] for run in runs}):
        counts = [run for run in runs if run["rounds"] == rounds]
        right, unfaithful = (
            statistics.mean(run[f"{name}_answers"] for run in counts) for name in ("right", "unfaithful")
        )
        parts.append(
            f"## After {rounds} rounds: {right:.0f} right answers a seed, {unfaithful:.0f} of them unfaithful\n"
        )
        for population in POPULATIONS:
            lines = [
                [number, *(cell(cells[rounds, population, label, number]) for label in LABELS)] for number in numbers
            ]
            parts += [f"AUROC among the tokens of {population}:\n", table([["number", *LABELS], *lines]), ""]
    costs = [[row["number"], cell(row)] for row in rows if "label" not in row]
    parts += ["## CPU time of tokens' parts, in times that of scores\n", table([["target", "ratio"], *costs]), ""]
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
