"""How often `prove` sees a cause where there is none, and where there is one: the level and the power of its verdicts.

Run: `python -m studies.verdicts.run results/verdicts [--only lander]`. In each world a small run is trained. Then

- *level*: 100 sets of random records, of each round as many, are left out in 20 seeds each. Each set is judged as if it
  were in question, in turn on 8 decisions and on what is tested. Of its controls, the random set and the placebo of a
  seed are others of the 100, so that nothing is a cause: what is "seen" is false.
- *power*: `whence.causes.prove` is asked about the 8 decisions, random ones of the last round that training raised,
  with the records that `nearest` names. "nearest, raw" are those that it would name with advantages as stored, in place
  of those that SB3's PPO normalised; they have the same controls.

Verdicts are of all 20 seeds, and of four times five. "before" is the rule that compared intervals of means, which took
the chance between sets for none. A training is not done again: the command goes on where it was interrupted; runs and
what was measured are kept in `--runs`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import typer

from studies.planted.judging import is_apart_by_means, score_by_raw
from studies.shared import Only, Out, Runs, report
from studies.verdicts.tables import write_tables
from whence.causes import AgentTraining, LanguageTraining, find_causes, prove
from whence.causes.agent_retraining import open_agent
from whence.causes.language_retraining import open_language
from whence.causes.proofs import list_trained
from whence.causes.ranking import KEYS
from whence.causes.retraining import VARIANTS, Retraining
from whence.causes.verdicts import MOVES, Values, judge, list_changes
from whence.core import write_atomically, write_json
from whence.lab.agents import configure
from whence.lab.agents import run as run_agent
from whence.lab.language import training as language_training
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig

NULLS, SEEDS, BLOCK, DECISIONS = 100, 20, 5, 8
"""Random sets, seeds of each, seeds of a small proof, and decisions that are asked about."""


class World(NamedTuple):
    """An environment, or None for the small language model; how many records a set holds, and tests."""

    env: str | None
    top: int
    tests: int = 0


WORLDS = {
    "acrobot": World("Acrobot-v1", 32),
    "lander": World("LunarLander-v3", 32, tests=5),
    "walker": World("BipedalWalker-v3", 32),
    "arithmetic": World(None, 6, tests=64),
}

PPO = {"n_steps": 256, "batch_size": 64, "n_epochs": 5, "learning_rate": 1e-3}
"""Agents' settings, for 4 rounds; all else is SB3's."""

LANGUAGE = {"rounds": 2, "batch_size": 64, "mini_batch_size": 16, "save_every": 1, "keep_checkpoints": 9}


def train(name: str, path: Path) -> RunDirectory:
    """Train a world's run where that is not done."""
    if (env := WORLDS[name].env) is not None:
        run_agent(configure(env=env, rounds=4, eval_episodes=0, hyperparameters=PPO), path)
    else:
        config = LanguageConfig("ppo", 0, size="tiny", held_out=0, settings={**LANGUAGE, "eval_every": 0})
        language_training.run(config, path)
    return RunDirectory.open(path)


@contextmanager
def open_world(name: str, run: RunDirectory, tests: int) -> Iterator[Retraining]:
    """Open a world's rounds to train again."""
    tables = {number: run.round("records", number) for number in run.rounds()}
    with ExitStack() as stack:
        if WORLDS[name].env is not None:
            yield stack.enter_context(open_agent(run, tables, None, AgentTraining(test_episodes=tests), None))
        else:
            yield stack.enter_context(open_language(run, tables, None, LanguageTraining(answers=tests)))


def choose_decisions(trained: pl.DataFrame) -> pl.DataFrame:
    """Return the records whose decisions are asked about: at random, of the last round's that training raised."""
    last = trained.filter(pl.col("round") == trained["round"].max())
    return last.filter(pl.col("advantage") > pl.col("advantage").mean()).sample(DECISIONS, seed=0, shuffle=True)


def draw_set(trained: pl.DataFrame, top: int, number: int) -> pl.DataFrame:
    """Return a random set, of each round as many."""
    rounds = [table for _, table in trained.group_by("round", maintain_order=True)]
    generator = np.random.default_rng([1, number])
    return pl.concat(
        table[np.sort(generator.choice(len(table), top // len(rounds), replace=False))] for table in rounds
    ).select(KEYS)


def measure_sets(name: str, run: RunDirectory, trained: pl.DataFrame, kept: Path) -> None:
    """Train without each random set, without none ("all"), and without what raw advantages name for each decision."""
    world, decisions = WORLDS[name], choose_decisions(trained)
    with open_world(name, run, 0) as plain, open_world(name, run, world.tests) as tested:
        rows = [plain.make_rows(decisions[place : place + 1].select(KEYS)) for place in range(DECISIONS)]

        def measure(group: pl.DataFrame, seed: int) -> dict[str, float]:
            policy = plain.train(group, seed)
            outcomes = {
                str(place): next(iter(plain.measure(policy, row, seed).values())) for place, row in enumerate(rows)
            }
            if world.tests:
                *_, (test, value) = tested.measure(policy, rows[0], seed).items()
                outcomes[test] = value
            return outcomes

        sets: dict[str, Callable[[], pl.DataFrame]] = {"all": partial(trained.select(KEYS).clear)}
        for place in range(DECISIONS if world.env is not None else 0):
            sets[f"raw_{place}"] = partial(_name_raw, run, plain, decisions, place, world.top)
        for number in range(NULLS):
            sets[f"null_{number}"] = partial(draw_set, trained, world.top, number)
        for title, choose in sets.items():
            if not (file := kept / f"{title}.json").exists():
                group = choose()
                report(name, title)
                write_json(file, [measure(group, seed) for seed in range(SEEDS)])


def _ask(retraining: Retraining, decisions: pl.DataFrame, place: int) -> Any:
    return retraining.read(decisions[place : place + 1].select(KEYS))


def _name_raw(run: RunDirectory, plain: Retraining, decisions: pl.DataFrame, place: int, top: int) -> pl.DataFrame:
    """Return what `nearest` would name for an agent's decision with raw advantages."""
    causes = find_causes(run, _ask(plain, decisions, place), method="nearest")
    ranked = causes.with_columns(score=score_by_raw(causes)).sort("score", *KEYS, descending=[True, False, False])
    return ranked.head(top).select(KEYS)


def read_sets(kept: Path) -> dict[str, list[dict[str, float]]]:
    """Return what was measured without each set, in the order of seeds."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(kept.glob("*.json"))}


def judge_nulls(name: str, sets: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[dict[str, Any]]:
    """Judge each random set against others, on a decision and on what was tested."""
    for number in range(NULLS):
        others = np.random.default_rng([2, number]).permutation([each for each in range(NULLS) if each != number])
        controls = {"random": others[:SEEDS], "placebo": others[SEEDS : 2 * SEEDS]}
        for outcome in (str(number % DECISIONS), *[key for key in sets["all"][0] if not key.isdigit()]):
            values = {
                variant: [each[outcome] for each in sets[title]]
                for variant, title in (("all", "all"), ("without", f"null_{number}"))
            }
            values |= {
                control: [sets[f"null_{chosen[seed]}"][seed][outcome] for seed in range(SEEDS)]
                for control, chosen in controls.items()
            }
            kind = "decision" if outcome.isdigit() else outcome
            yield from judge_blocks({"world": name, "what": "null", "number": number, "outcome": kind}, values)


def judge_causes(
    name: str, run: RunDirectory, trained: pl.DataFrame, sets: Mapping[str, Sequence[Mapping[str, float]]]
) -> Iterator[dict[str, Any]]:
    """Prove what `nearest` names for each decision, and judge what it would name by raw advantages."""
    decisions, world = choose_decisions(trained), WORLDS[name]
    training = AgentTraining(test_episodes=0) if world.env is not None else LanguageTraining(answers=0)
    with open_world(name, run, 0) as opened:
        questions = [_ask(opened, decisions, place) for place in range(DECISIONS)]
    for place, question in enumerate(questions):
        report(name, f"decision {place}")
        words = f"decision {place}"
        proof = prove(run, question, words=words, top=world.top, seeds=SEEDS, training=training)
        values: Values = next(iter(proof.outcomes.values()))
        about = {"world": name, "number": place, "outcome": "decision"}
        yield from judge_blocks(about | {"what": "nearest"}, values)
        if (title := f"raw_{place}") in sets:  # a language model's advantages are as they trained
            raw = {**values, "without": [each[str(place)] for each in sets[title]]}
            yield from judge_blocks(about | {"what": "nearest, raw"}, raw)


def judge_blocks(about: Mapping[str, Any], values: Values) -> Iterator[dict[str, Any]]:
    """Judge the values of all seeds, and of each block of them."""
    for count in (SEEDS, BLOCK):
        for first in range(0, SEEDS, count):
            part = {variant: values[variant][first : first + count] for variant in VARIANTS}
            changes = {variant: list_changes(part, variant) for variant in VARIANTS}
            seen = {
                "seen": judge({"outcome": part}, {})["outcome"] in MOVES,
                "by_random": judge({"outcome": {**part, "placebo": part["random"]}}, {})["outcome"] in MOVES,
                "before": is_apart_by_means(changes),
            }
            yield {**about, "seeds": count, "first": first, **seen, "change": float(np.mean(changes["without"]))}


def main(out: Out, runs: Runs = Path("out/verdicts"), only: Only = "") -> None:
    """Train and judge what is not there yet, and write verdicts.parquet and tables.md."""
    torch.set_num_threads(1)
    for name in (name for name in WORLDS if name.startswith(only)):
        run, kept = train(name, runs / name), runs / f"{name}_sets"
        trained = list_trained({number: run.round("records", number) for number in run.rounds()})
        measure_sets(name, run, trained, kept)
        sets = read_sets(kept)
        rows = pl.DataFrame([*judge_nulls(name, sets), *judge_causes(name, run, trained, sets)])
        file = out / "verdicts.parquet"
        known = pl.read_parquet(file).filter(pl.col("world") != name) if file.exists() else rows.clear()
        out.mkdir(parents=True, exist_ok=True)
        with write_atomically(file) as temporary:
            pl.concat([known, rows]).sort("world", "what", "number", maintain_order=True).write_parquet(temporary)
        write_tables(out)


if __name__ == "__main__":
    typer.run(main)
