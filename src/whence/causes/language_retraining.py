"""A language model's rounds trained again on stored rollouts of any trainer, without the ones in question."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import polars as pl
import torch

from whence.causes.ranking import KEYS
from whence.causes.response_causes import Examples, read_examples
from whence.causes.retraining import LanguageTraining, Retraining
from whence.core import NonFinite, RecordBatch, RunDirectoryError, WhenceError, preserve_rng_state
from whence.llm.base import PPOConfig
from whence.llm.ppo import Recipe, evaluate_log_probs, read_recipe, train_again
from whence.llm.text import Reward, adapt_trl_reward, compute_rewards, find_columns, generate, read_chat
from whence.runs import RunDirectory
from whence.scores import check_parameters
from whence.selection import read_weights
from whence.stored import language

log = logging.getLogger(__name__)

_SOURCES = ("model", "reward", "reward_model")
"""What the trainings' outcomes depend on besides the run; further rewards have numbers."""

SHORT = 32
"""Tokens up to which a response's whole log-probability is measured; of a longer one it is the mean of its tokens."""


@contextmanager
def open_language(
    run: RunDirectory,
    tables: Mapping[int, pl.DataFrame],
    behaviour: Examples | pl.DataFrame | None,
    training: LanguageTraining,
) -> Iterator[Retraining]:
    """Open a language model's rounds to train again, the same way for the runs of every trainer; policies are models.

    A copy of the policy before the first round goes through all rounds as `train_again` does, by the run's settings. In
    one seed all trainings share their orders, and the random numbers of fresh answers.
    """
    for number, table in tables.items():
        if missing := [name for name in ("prompt_ids", "response_ids", "advantage") if name not in table.columns]:
            raise RunDirectoryError(
                f"Round {number} of {run.path} lacks {missing[0]}, without which it cannot be trained on again. Keep "
                "the trainer's rollout files, and make a run of them: whence llm score."
            )
    recipe = read_recipe(run.config, training.learning_rate, training.epochs)
    with language.hide_progress_bars():
        policy, tokenizer = language.load_start_policy(run, min(tables), training.model)
        start = {name: tensor.detach().clone() for name, tensor in policy.named_parameters() if tensor.requires_grad}
        measure_answers = _make_measure(run, tables, tokenizer, recipe, training)
        rounds, notes = _read_rounds(run, tables, tokenizer, policy.device)

        def make_rows(left_out: pl.DataFrame) -> RecordBatch:
            responses = left_out if behaviour is None else behaviour
            texts = responses.pairs if isinstance(responses, Examples) else []
            prompts = [{"prompt": prompt} for prompt, _ in texts]
            make_target, _ = read_examples(run, responses)
            target = make_target(language.Task(policy, tokenizer, prompts, lambda *texts: [], None, None, None))
            assert target.rows is not None
            return target.rows

        def read(keys: pl.DataFrame) -> Examples:
            ids = keys.select("round", "record_id").iter_rows()
            rows = [
                tables[number].row(by_predicate=pl.col("record_id") == record, named=True) for number, record in ids
            ]
            return Examples([read_chat(row, "prompt") for row in rows], [row["response"] for row in rows])

        def train(left_out: pl.DataFrame, seed: int) -> Any:
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if name in start:
                        parameter.copy_(start[name])
            weights = {number: _weigh(table, number, left_out) for number, table in tables.items()}
            train_again(policy, rounds, weights, recipe, seed=seed)
            return policy

        def measure(policy: Any, rows: RecordBatch, seed: int) -> dict[str, float]:
            check_parameters(policy.named_parameters())
            outcomes = _measure_log_prob(policy, rows, recipe) | measure_answers(policy, seed)
            return dict(sorted(outcomes.items(), key=lambda outcome: outcome[0] != "share"))

        def load_end() -> Any:
            ended = _load_end(run, max(tables))
            return None if ended is None else ended.to(policy.device)

        words, stored, match = "these responses", {}, training.match
        if isinstance(behaviour, Examples):
            words = behaviour.words
        elif behaviour is not None:
            words, stored = f"one of {len(behaviour)} stored responses", {"records": behaviour.select(KEYS).rows()}
        answers = [training.answers, match, *(training.rewards or (None,))]
        yield Retraining(
            records="rollouts",
            subject=words if match is None else f"“{match}”",
            about={
                "behaviour": words,
                "recipe": recipe.text,
                "answers": answers,
                "model": training.model,
                "contents": _digest_sources(run, training),
                "measured": "log-probability",
                **stored,
            },
            notes=[*notes, *_list_unmeasured(tables, training), f"Trained by {recipe.text}."],
            make_rows=make_rows,
            read=read,
            train=train,
            measure=measure,
            load_end=load_end,
        )


def _digest_sources(run: RunDirectory, training: LanguageTraining) -> dict[str, str]:
    """Return digests of the model and the rewards that the trainings' outcomes depend on."""
    names = {"model": run.config.get("model"), **run.experiment} if run.is_trusted else {}
    names |= {} if training.model is None else {"model": training.model}
    names |= {"reward" if place == 0 else f"reward {place}": name for place, name in enumerate(training.rewards)}
    return language.digest_sources({name: value for name, value in names.items() if name.split()[0] in _SOURCES})


def _read_rounds(
    run: RunDirectory, tables: Mapping[int, pl.DataFrame], tokenizer: Any, device: Any
) -> tuple[dict[int, RecordBatch], list[str]]:
    """Return the rows of each round to train on, and what is to be said of them."""
    is_known = "ppo" in run.config and run.is_trusted  # else the rounds' policies are not built again
    stored = language.list_policies(run).rounds if is_known else []
    make_rows = language.make_stored_rows
    rows = {
        number: language.rebuild_rows(run, number) if number in stored else make_rows(table, tokenizer, device)
        for number, table in tables.items()
    }
    if "ppo" not in run.config or len(stored) >= len(tables):
        return rows, []
    return rows, ["PPO's advantages of single tokens are not stored: a token has that of its response's last one."]


def _weigh(table: pl.DataFrame, number: int, left_out: pl.DataFrame) -> torch.Tensor:
    """Return the weights with which a round's rows train, 0 for those that are left out."""
    ids = left_out.filter(pl.col("round") == number)["record_id"].to_list()
    return torch.from_numpy(read_weights(table) * ~table["record_id"].is_in(ids).to_numpy()).float()


def _load_end(run: RunDirectory, number: int) -> Any:
    """Return the policy that the run itself had after a round; None: it was not kept."""
    if not (run.is_trusted and language.knows_policies(run)):
        return None
    if number == run.rounds()[-1]:
        trained = language.load_trained_task(run)
        return None if trained is None else trained[0].model
    return language.load_start_policy(run, number + 1)[0] if language.has_policy(run, number + 1) else None


def _measure_log_prob(policy: Any, rows: RecordBatch, recipe: Recipe) -> dict[str, float]:
    """Return the mean log-probability of the rows' responses, or of a token of theirs if they are long."""
    log_probs = evaluate_log_probs(policy, rows, recipe).double().sum(dim=1)
    lengths = rows.observations["response_mask"].sum(dim=1)
    if float(lengths.double().mean()) <= SHORT:
        return {"log-probability": float(log_probs.mean())}
    return {"log-probability of a token": float((log_probs / lengths.clamp(min=1)).mean())}


def _make_measure(
    run: RunDirectory, tables: Mapping[int, pl.DataFrame], tokenizer: Any, recipe: Recipe, training: LanguageTraining
) -> Callable[[Any, int], dict[str, float]]:
    """Return what measures a policy by fresh answers to stored prompts: the share that holds a text, and rewards."""
    answers, match, rewards = training.answers, training.match, _load_rewards(run, training)
    if match is not None and not answers:
        raise WhenceError("match is looked for in fresh answers, and answers is 0: ask for some, such as 256.")
    if not (rewards or match is not None) or not answers:
        return lambda policy, seed: {}
    table = pl.concat(tables.values(), how="diagonal_relaxed").unique("prompt", maintain_order=True)
    table = table.sample(min(answers, len(table)), seed=0, shuffle=True)
    table = pl.concat([table] * -(-answers // len(table))).head(answers)
    chats = [read_chat(row, "prompt") for row in table.to_dicts()] if "chat.prompt" in table.columns else None
    rewards = {name: adapt_trl_reward(each, chats) for name, each in rewards.items()}
    infos = {name[5:]: table[name].to_list() for name in table.columns if name.startswith("info.")}
    columns = {name: {key: infos[key] for key in find_columns(each, list(infos))} for name, each in rewards.items()}
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
        for name, reward in rewards.items():
            try:
                outcomes[name] = float(compute_rewards(reward, fresh.prompts, fresh.texts, columns[name]).mean())
            except NonFinite as error:  # of one answer; the other outcomes are measured
                log.warning("Not measured, the %s of fresh answers: %s", name, error)
                outcomes[name] = math.nan
        return outcomes

    return measure


def _load_rewards(run: RunDirectory, training: LanguageTraining) -> dict[str, Reward]:
    """Return the rewards of fresh answers by their outcomes' names: of several those that the run's columns have."""
    if not training.answers:
        return {}
    if not (names := training.rewards) and run.experiment:
        return {"reward": language.load_task(language.LanguageConfig.from_json(run.trusted(run.experiment))).reward}
    short = [name.rpartition(":")[2] for name in names]
    outcomes = [f"reward.{name if short.count(last) > 1 else last}" for name, last in zip(names, short, strict=True)]
    outcomes = ["reward"] if len(names) == 1 else outcomes
    return dict(zip(outcomes, map(language.load_function, names), strict=True))


def _list_unmeasured(tables: Mapping[int, pl.DataFrame], training: LanguageTraining) -> list[str]:
    """Return a note on the rewards that the run has and no function measures."""
    measured = {f"reward.{name.rpartition(':')[2]}" for name in training.rewards}
    columns = dict.fromkeys(name for table in tables.values() for name in table.columns if name.startswith("reward."))
    missing = [name for name in columns if name not in measured]
    if not training.answers or not missing:
        return []
    return [f"Not measured: {', '.join(missing)}. Name each one's function: --reward FILE.PY:FUNCTION."]
