"""Proofs of what taught a language model a response: trainings on stored rollouts, without the ones in question."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch

from whence.causes.proofs import FOLDER, Proof, check_left_out, list_trained, name_top, prove
from whence.causes.response_causes import INFLUENCE, find_response_causes, read_examples
from whence.core import RecordBatch, RunDirectoryError, WhenceError, preserve_rng_state
from whence.llm.base import PPOConfig
from whence.llm.ppo import Recipe, evaluate_log_probs, read_recipe, train_again
from whence.llm.text import Prompt, Reward, compute_rewards, find_columns, generate, read_chat
from whence.runs import RunDirectory, check_links
from whence.selection import read_weights
from whence.stored.language import (
    LanguageConfig,
    Task,
    hide_progress_bars,
    list_policies,
    load_function,
    load_start_policy,
    load_task,
    load_trained_task,
    make_stored_rows,
    rebuild_rows,
)

SHORT = 32
"""Tokens up to which a response's whole probability is measured; of a longer one it is the mean one of a token."""


@hide_progress_bars()
def prove_response(
    run: RunDirectory,
    prompt: Prompt | None = None,
    response: str | None = None,
    left_out: pl.DataFrame | None = None,
    *,
    match: str | None = None,
    method: str = INFLUENCE,
    top: int = 64,
    rounds: Sequence[int] | None = None,
    seeds: int = 5,
    answers: int = 256,
    model: str | None = None,
    reward: str | None = None,
    learning_rate: float | None = None,
    epochs: int | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Proof:
    """Train a language model again on stored rollouts, without those that taught a response, and with two controls.

    Each training begins with a copy of the policy of the first round, and goes through all rounds as `train_again`
    does, by the run's settings: the same way for the runs of every trainer. In one seed all trainings share their
    orders, and the random numbers of fresh answers.

    Args:
        run: the run of a language model, or rollouts that `score_rollouts` made a run of.
        prompt: with `response`, the behaviour; None: what the left-out responses say.
        response: a text.
        left_out: the rollouts to leave out, `round` and `record_id`; None: those that a finder names.
        match: a text; the share of fresh answers that hold it is measured first.
        method: the finder, one of `find_response_causes`.
        top: how many rollouts it names.
        rounds: the rounds; None: all.
        seeds: the number of seeds, of orders, random rollouts, placebos and answers.
        answers: fresh answers, to stored prompts, by which each policy is measured; 0: none.
        model: the checkpoint before the first round, a folder or an id; None: the run's.
        reward: "file.py:function" of the reward of answers; None: the run's, if the command trained it.
        learning_rate: in place of the run's.
        epochs: in place of the run's.
        on_stage: called with the name of each training as it begins.

    Raises:
        RunDirectoryError: a round is not there, or the policy before the first one.
        WhenceError: `match` is given and no `answers`; or see `check_left_out` and `find_response_causes`.
    """
    check_links(run.path)
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    run.require_rounds(numbers)
    tables = {number: _read_table(run, number) for number in numbers}
    recipe, trained = read_recipe(run.config, learning_rate, epochs), list_trained(tables)
    policy, tokenizer = load_start_policy(run, numbers[0], model)

    def find(prompt: Prompt, response: str) -> pl.DataFrame:
        return name_top(find_response_causes(run, prompt, response, rounds=numbers, method=method), trained, top)

    find_placebo = None
    if left_out is None:
        assert prompt is not None
        assert response is not None
        on_stage("finding the rollouts")
        left_out = find(prompt, response)
        others = trained.join(left_out, on=["round", "record_id"], how="anti")

        def find_placebo(generator: np.random.Generator) -> pl.DataFrame:
            number, record, *_ = others.row(int(generator.integers(len(others))))
            row = tables[number].row(by_predicate=pl.col("record_id") == record, named=True)
            return find(read_chat(row, "prompt"), row["response"])

    left_out = check_left_out(trained, left_out)
    examples = (prompt, response, None) if prompt is not None and response is not None else ((), (), left_out)
    make_target, _ = read_examples(run, *examples)
    behaviour = make_target(Task(policy, tokenizer, [{"prompt": prompt}], _refuse, None, None, None)).rows
    assert behaviour is not None
    measure_answers = _make_measure(run, tables, tokenizer, recipe, reward, match, answers)
    start = {name: tensor.detach().clone() for name, tensor in policy.named_parameters() if tensor.requires_grad}
    rows, notes = _read_rows(run, tables, tokenizer, policy.device)
    notes.append(f"Trained by {recipe.text}.")

    def measure_policy(policy: Any, seed: int) -> dict[str, float]:
        outcomes = _measure_probability(policy, behaviour, recipe) | measure_answers(policy, seed)
        return dict(sorted(outcomes.items(), key=lambda outcome: outcome[0] != "share"))

    def measure(group: pl.DataFrame, seed: int) -> dict[str, float]:
        weights = {number: _weigh(table, number, group) for number, table in tables.items()}
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name in start:
                    parameter.copy_(start[name])
        train_again(policy, rows, weights, recipe, seed=seed)
        return measure_policy(policy, seed)

    words = "these responses" if prompt is None else f"“{response}” after “{prompt}”"
    table, file = prove(
        trained,
        left_out,
        measure,
        find_placebo=find_placebo,
        seeds=seeds,
        folder=run.path / FOLDER,
        about={
            "behaviour": words,
            "rounds": numbers,
            "method": None if find_placebo is None else method,
            "recipe": recipe.text,
            "answers": [answers, match, reward],
            "model": model,
        },
        on_stage=on_stage,
    )
    ended = _load_end(run, numbers[-1])
    stored = {} if ended is None else measure_policy(ended.to(policy.device), 0)
    subject = words if match is None else f"“{match}”"
    return Proof(subject, "rollouts", len(left_out), table, stored, notes, file)


def _read_rows(
    run: RunDirectory, tables: Mapping[int, pl.DataFrame], tokenizer: Any, device: Any
) -> tuple[dict[int, RecordBatch], list[str]]:
    """Return the rows of each round to train on, and what is to be said of them."""
    stored = list_policies(run).rounds if run.experiment and "ppo" in run.config else []
    rows = {
        number: rebuild_rows(run, number) if number in stored else make_stored_rows(table, tokenizer, device)
        for number, table in tables.items()
    }
    if "ppo" not in run.config or len(stored) >= len(tables):
        return rows, []
    return rows, ["PPO's advantages of single tokens are not stored: a token has that of its response's last one."]


def _load_end(run: RunDirectory, number: int) -> Any | None:
    """Return the policy that the run itself came to by a round; None: it was not kept."""
    if not run.experiment:
        return None
    if number == run.rounds()[-1]:
        trained = load_trained_task(run)
        return None if trained is None else trained[0].model
    return load_start_policy(run, number + 1)[0] if number + 1 in list_policies(run).rounds else None


def _refuse(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    raise AssertionError("No response is graded here.")


def _read_table(run: RunDirectory, number: int) -> pl.DataFrame:
    table = run.round("records", number)
    if missing := [name for name in ("prompt_ids", "response_ids", "advantage") if name not in table.columns]:
        raise RunDirectoryError(
            f"Round {number} of {run.path} lacks {missing[0]}, without which it cannot be trained on again. Keep the "
            "trainer's rollout files, and make a run of them: whence llm score."
        )
    return table


def _weigh(table: pl.DataFrame, number: int, group: pl.DataFrame) -> torch.Tensor:
    """Return the weights with which a round's rows train, 0 for those of a group."""
    ids = group.filter(pl.col("round") == number)["record_id"]
    trains = ~table["record_id"].is_in(ids.to_list()).to_numpy()
    return torch.from_numpy(read_weights(table) * trains).float()


def _measure_probability(policy: Any, rows: RecordBatch, recipe: Recipe) -> dict[str, float]:
    """Return the mean probability of the rows' responses, or of one of their tokens if they are long."""
    log_probs = evaluate_log_probs(policy, rows, recipe).double().sum(dim=1)
    lengths = rows.observations["response_mask"].sum(dim=1)
    if float(lengths.double().mean()) <= SHORT:
        return {"probability": float(log_probs.exp().mean())}
    return {"probability of a token": float((log_probs / lengths.clamp(min=1)).exp().mean())}


def _make_measure(
    run: RunDirectory,
    tables: Mapping[int, pl.DataFrame],
    tokenizer: Any,
    recipe: Recipe,
    reward: str | None,
    match: str | None,
    answers: int,
) -> Callable[[Any, int], dict[str, float]]:
    """Return what measures a policy by fresh answers to stored prompts: the share that holds a text, and the reward."""
    grade: Reward | None = None if reward is None else load_function(reward)
    if grade is None and run.experiment and answers:
        grade = load_task(LanguageConfig.from_json(run.experiment)).reward
    if match is not None and not answers:
        raise WhenceError("match is looked for in fresh answers, and answers is 0: ask for some, such as 256.")
    if (grade is None and match is None) or not answers:
        return lambda policy, seed: {}
    table = pl.concat(tables.values(), how="diagonal_relaxed").unique("prompt", maintain_order=True)
    table = table.sample(min(answers, len(table)), seed=0, shuffle=True)
    table = pl.concat([table] * -(-answers // len(table))).head(answers)
    infos = {name[5:]: table[name].to_list() for name in table.columns if name.startswith("info.")}
    columns = {} if grade is None else {name: infos[name] for name in find_columns(grade, list(infos))}
    settings = run.config.get("ppo") or run.config.get("trl") or {}
    longest = max(int(each["response_ids"].list.len().max()) for each in tables.values())  # type: ignore[arg-type]
    sampling = PPOConfig(
        "runs/measured",
        max_new_tokens=longest,
        temperature=recipe.temperature,
        top_k=settings.get("top_k") or 0,
        top_p=settings.get("top_p", 1.0),
    )

    def measure(policy: Any, seed: int) -> dict[str, float]:
        with preserve_rng_state():
            torch.manual_seed(seed)
            fresh = generate(policy, tokenizer, table["prompt_ids"].to_list(), sampling)
        outcomes = {} if match is None else {"share": sum(match in text for text in fresh.texts) / len(fresh.texts)}
        if grade is not None:
            outcomes["reward"] = float(compute_rewards(grade, fresh.prompts, fresh.texts, columns).mean())
        return outcomes

    return measure
