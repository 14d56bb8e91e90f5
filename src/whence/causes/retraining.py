"""Rounds trained again without some records: the settings, and what agents and language models do each in their way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from whence.core import RecordBatch
from whence.validation import Count, Natural, Positive, settings


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
        reward: FILE.PY:FUNCTION, the reward of these answers; None: the run's, if known.
        model: the checkpoint before the first round, a folder or an id; None: the run's, if known.
        learning_rate: the trainings' learning rate; None: the run's.
        epochs: passes over a round; None: the run's.
    """

    match: str | None = None
    answers: Natural = 256
    reward: str | None = None
    model: str | None = None
    learning_rate: Positive | None = None
    epochs: Count | None = None


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
        measure: returns a policy's outcomes by name: the probability of the rows, and tests by a seed.
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
