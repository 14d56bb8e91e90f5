"""The trainings of a proof: their settings, what each leaves out, and what agents and language models do."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from whence.causes.ranking import KEYS
from whence.core import NonFinite, RecordBatch, require_file, write_json
from whence.runs import is_signature, sign
from whence.validation import Count, Natural, Positive, settings

log = logging.getLogger(__name__)

VARIANTS = ("all", "without", "random", "placebo")
"""What each training leaves out: nothing, the records in question, as many others at random, and a placebo's."""

NEIGHBOURS = 10
"""Free records of the nearest advantages, of which a placebo's is drawn for each that is left out."""


@settings("An agent's training without some records")
class AgentTraining:
    """How an agent is tested after its rounds were trained again.

    Attributes:
        test_episodes: episodes to test each trained policy by; 0: its test return is not measured.
    """

    test_episodes: Natural = 50


@settings("A language model's training without some rollouts")
class LanguageTraining:
    """How a language model is trained again, and measured by fresh answers to stored prompts.

    Attributes:
        match: a text; the share of fresh answers that hold it is measured first.
        answers: fresh answers, for match and the mean reward; 0: none.
        reward: FILE.PY:FUNCTION, the reward of these answers, or several; None: the run's, if known.
        model: the checkpoint before the first round, a folder or an id; None: the run's, if known.
        learning_rate: the trainings' learning rate; None: the run's.
        epochs: passes over a round; None: the run's.
    """

    match: str | None = None
    answers: Natural = 256
    reward: str | Sequence[str] | None = None
    model: str | None = None
    learning_rate: Positive | None = None
    epochs: Count | None = None

    @property
    def rewards(self) -> list[str]:
        """The rewards' names; none for the run's."""
        return [self.reward] if isinstance(self.reward, str) else [*(self.reward or ())]


@dataclass(frozen=True)
class Retraining:
    """A model whose stored rounds are trained again, in the way of its kind. Keys are `round` and `record_id`.

    Attributes:
        records: what a record is called: "records" or "rollouts".
        subject: what is measured first, in words.
        about: the question in JSON types.
        notes: what a reader has to know of how it is done.
        make_rows: returns the examples of the behaviour; without one, of what the left-out records did, by their keys.
        read: returns what was done in some records, by their keys, as a behaviour to ask about.
        train: trains a policy through all rounds without some records, by their keys and a seed, and returns it.
        measure: returns a policy's outcomes by name: the rows' mean log-probability, and tests by a seed.
        load_end: returns the policy that the run itself had after the last round; None: it is not there.
    """

    records: str
    subject: str
    about: Mapping[str, Any]
    notes: Sequence[str]
    make_rows: Callable[[pl.DataFrame], RecordBatch]
    read: Callable[[pl.DataFrame], Any]
    train: Callable[[pl.DataFrame, int], Any]
    measure: Callable[[Any, RecordBatch, int], dict[str, float]]
    load_end: Callable[[], Any]


def train_variants(
    trainings: Mapping[str, Callable[[int], Mapping[str, float]]],
    seeds: int,
    folder: Path,
    question: Any,
    about: Mapping[str, Any],
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[pl.DataFrame, Path]:
    """Train each variant in each seed, and measure what comes of it.

    After each training its outcomes are written to a file in the folder, named by the question, so that the same
    question continues there. What is not finite is null there, and so is every outcome of a training that diverged.

    Args:
        trainings: by variant, a function that trains by a seed and returns the outcomes.
        seeds: the number of seeds, from 0.
        folder: where the file is.
        question: what makes the trainings what they are, in JSON types; `about` is what the file says of them besides.
        on_stage: called with the name of each training as it begins.
    """
    file = folder / f"{sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:12]}.json"
    rows = _read_rows(file)
    for seed, variant in product(range(seeds), trainings):
        if any((row["seed"], row["variant"]) == (seed, variant) for row in rows):
            continue
        on_stage(f"seed {seed + 1} of {seeds}: {variant}")
        outcomes = measure_finite(partial(trainings[variant], seed), f"seed {seed}, {variant}")
        rows.append({"seed": seed, "variant": variant, "outcomes": outcomes})
        write_json(file, {**about, "rows": rows, "signature": sign(file, rows)})
    rows = [row for row in rows if row["seed"] < seeds and row["variant"] in trainings]
    names = dict.fromkeys(name for row in rows for name in row["outcomes"])
    cells = [(row["seed"], row["variant"], name, row["outcomes"].get(name)) for row in rows for name in names]
    types = {"seed": pl.Int64, "variant": pl.String, "outcome": pl.String, "value": pl.Float64}
    return pl.DataFrame(cells, schema=types, orient="row"), file


def list_choices(
    left_out: pl.DataFrame, others: pl.DataFrame, choose_placebo: Callable[[np.random.Generator], pl.DataFrame]
) -> dict[str, Callable[[int], pl.DataFrame]]:
    """Return, for each of `VARIANTS`, a function that returns by a seed what it leaves out, by `KEYS`.

    Random records are of the same rounds as those in question; they and a placebo's are drawn anew in each seed.
    """
    choices: Sequence[Callable[[np.random.Generator], pl.DataFrame]] = (
        lambda generator: left_out.clear(),
        lambda generator: left_out,
        partial(_draw_matched, others, left_out),
        choose_placebo,
    )

    def choose(place: int, seed: int) -> pl.DataFrame:
        return choices[place](np.random.default_rng([seed, place])).select(KEYS)

    return {variant: partial(choose, place) for place, variant in enumerate(VARIANTS)}


def measure_finite(measure: Callable[[], Mapping[str, float]], name: str) -> dict[str, float | None]:
    """Return outcomes, None for one that is not finite, and none at all if the training diverged; `name` is its."""
    try:
        return {outcome: keep_finite(value) for outcome, value in measure().items()}
    except NonFinite as error:
        log.warning("Not measured, %s: %s", name, error)
        return {}


def keep_finite(value: float | None) -> float | None:
    """Return a value that is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def _draw_matched(others: pl.DataFrame, left_out: pl.DataFrame, generator: np.random.Generator) -> pl.DataFrame:
    """Return other records at random, of each round as many as are left out."""
    pools = [
        (others.filter(pl.col("round") == number), count)
        for number, count in left_out.group_by("round", maintain_order=True).len().iter_rows()
    ]
    return pl.concat(pool[np.sort(generator.choice(len(pool), count, replace=False))] for pool, count in pools)


def match_advantages(trained: pl.DataFrame, left_out: pl.DataFrame, generator: np.random.Generator) -> pl.DataFrame:
    """Return other records, each of the same round and drawn from the `NEIGHBOURS` nearest advantages that are free."""
    parts = []
    for (number,), group in left_out.group_by("round", maintain_order=True):
        table = trained.filter(pl.col("round") == number)
        pool = table.join(group, on=KEYS, how="anti")
        advantages, places = pool["advantage"].to_numpy().copy(), []
        for advantage in table.join(group, on=KEYS, how="semi")["advantage"]:
            nearest = np.argsort(np.abs(advantages - advantage), kind="stable")[:NEIGHBOURS]
            places.append(int(generator.choice(nearest[np.isfinite(advantages[nearest])])))
            advantages[places[-1]] = np.inf
        parts.append(pool[sorted(places)])
    return pl.concat(parts)


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the trainings in a file, which the log says; none of a file that is damaged, or not signed by this user.

    Whoever hands over a run can write such a file, and a proof is what was measured here.
    """
    try:
        content = json.loads(require_file(file).read_text(encoding="utf-8"))
        rows, signature = list(content["rows"]), str(content["signature"]).encode()
    except FileNotFoundError:
        return []
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        rows, signature = [], b""
    if not is_signature(signature, file, rows):
        log.warning("%s was not written by you in this place, or is damaged: all is measured anew.", file)
        return []
    log.warning("%s holds %d trainings of this proof: they are taken from there, not measured again.", file, len(rows))
    return rows
