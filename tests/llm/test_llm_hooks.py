"""Rules and flags as other trainers' functions: slime's filters, by a fixture of its samples."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from whence import AdvantageMagnitude, FromMask, NonPositive, RunDirectory, WhenceError, ZeroVariance
from whence.llm.hooks import slime_filter, slime_group_filter
from whence.runs import write_flag


@dataclass
class Sample:
    """What slime's filters are given (slime/utils/types.py): its fields that are read, and the one that is set."""

    group_index: int
    index: int
    reward: Any
    prompt: Any = "ab"
    response: str = "c"
    tokens: list[int] = field(default_factory=lambda: [2, 3, 4])
    response_length: int = 1
    remove_sample: bool = False

    def get_reward_value(self, args: Any) -> float:
        reward: float = self.reward if not args.reward_key else self.reward[args.reward_key]
        return reward


PLAIN = SimpleNamespace(reward_key=None)


def make_groups() -> list[list[Any]]:
    rewards = [[1.0, 1.0, 1.0], [0.0, 1.0, 5.0]]
    return [
        [Sample(7 + g, 10 + 3 * g + i, reward) for i, reward in enumerate(group)] for g, group in enumerate(rewards)
    ]


def list_removed(groups: list[list[Any]]) -> list[int]:
    turns = [turn for group in groups for one in group for turn in (one if isinstance(one, list) else [one])]
    return [turn.index for turn in turns if turn.remove_sample]


@pytest.mark.parametrize(
    ("rule", "removed"),
    [
        (ZeroVariance(), [10, 11, 12]),
        (AdvantageMagnitude(0.5), [10, 11, 12]),
        (FromMask([12, 14]), [12, 14]),
        (None, []),
    ],
    ids=repr,
)
def test_a_rule_marks_the_samples_that_it_drops(rule: Any, removed: list[int]) -> None:
    groups = make_groups()
    slime_filter(rule)(PLAIN, groups)
    assert list_removed(groups) == removed


def test_turns_in_a_samples_place_stay_together_and_rewards_may_have_parts() -> None:
    turns = [Sample(0, 0, {"a": 1.0, "b": 9.0}), Sample(0, 0, {"a": 1.0, "b": 9.0})]
    groups: list[list[Any]] = [[turns, Sample(0, 1, {"a": 1.0, "b": 2.0})]]
    slime_filter(FromMask([0]))(SimpleNamespace(reward_key="b"), groups)
    assert [turn.remove_sample for turn in turns] == [True, True]
    assert slime_group_filter(ZeroVariance())(SimpleNamespace(reward_key="b"), groups[0], evaluation=False) is True
    assert slime_group_filter(ZeroVariance())(SimpleNamespace(reward_key="a"), groups[0]) is False
    assert slime_group_filter(FromMask([0]))(SimpleNamespace(reward_key="a"), groups[0]) is True


def test_flagged_responses_are_known_by_their_texts(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", {"kind": "language"})
    texts = {"prompt": ["ab", "ab"], "response": ["c", "dd"]}
    run.write_round("records", 1, pl.DataFrame({"record_id": [40, 41], **texts}))
    run.release()
    write_flag(run.path, 1, 41, "hacks")
    groups = [[Sample(0, 0, 1.0), Sample(0, 1, 2.0, response="dd")]]
    groups += [[Sample(1, 2, 1.0, prompt=[{"role": "user", "content": "ab"}], response="dd")]]
    groups += [[Sample(2, 3, 1.0, prompt="b", response="dd")]]
    slime_filter(flagged=run.path)(PLAIN, groups)
    assert list_removed(groups) == [1, 2]


def test_a_rule_that_reads_scores_is_refused() -> None:
    with pytest.raises(WhenceError, match=r"slime.* flag responses"):
        slime_filter(NonPositive())
