"""The one codec: values come back exactly, settings are data, and both have words for people."""

import json
import math
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whence import DTV, IIF, Action, FromMask, RandomDrop, Return
from whence.core import decode, describe, describe_part, encode, library_versions, packages, read_numbers, show
from whence.llm.scores import SequenceReturn

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("tuple"), inner) | st.tuples(inner, inner),
)


@given(VALUES)
def test_values_come_back_in_their_types(value):
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert repr(again) == repr(value)  # which tells 1 from 1.0, a tuple from a list, and -0.0 from 0.0


@pytest.mark.parametrize(
    "value", [math.nan, np.float32(0.1), np.bool_(True), np.array([[1.5, math.inf]]), np.zeros((2, 1), np.uint8)]
)
def test_numbers_that_json_lacks_come_back(value):
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert type(again) is type(value)
    np.testing.assert_array_equal(again, value, strict=True)


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, np.array([None]), [torch.ones(1)]])
def test_what_it_cannot_give_back_is_refused(value):
    with pytest.raises(TypeError, match="and no <class"):
        encode(value)


def test_a_callers_kinds_come_first():
    complexes = lambda value: {"complex": [value.real, value.imag]} if isinstance(value, complex) else None  # noqa: E731
    stored = encode([1j, (2, 1 + 1j)], complexes)
    assert decode(stored) == [{"complex": [0.0, 1.0]}, (2, {"complex": [1.0, 1.0]})]  # whoever does not know them
    assert decode(stored, lambda each: complex(*each["complex"]) if "complex" in each else None) == [1j, (2, 1 + 1j)]


@dataclass
class Options:
    path: Path
    rate: float = math.inf


def test_settings_are_data():
    settings = {"options": Options(Path("a/b")), 1: (np.float64(2), torch.arange(2)), "call": partial(max, 1, key=abs)}
    stored = {
        "options": {"path": "a/b", "rate": "inf"},
        "1": [2.0, [0, 1]],
        "call": {"call": "builtins.max", "args": [1], "kwargs": {"key": "builtins.abs"}},
    }
    assert describe(settings) == stored
    assert read_numbers(stored)["options"] == {"path": "a/b", "rate": math.inf}
    assert "0x" not in describe(object())


def mine(view, params, records):
    return view


class Mine:
    def __call__(self, view, params, records):
        return view


MASK = {"rule": "FromMask", "ids": [3, 7], "unit": "episode"}
PARTS = [
    ("rule", IIF(), {"rule": "IIF", "drop": 0.125, "warmup": 0, "unit": "record"}, "IIF(drop=0.125, warmup=0)"),
    ("rule", FromMask([7, 3], "episode"), MASK, "FromMask(ids=[3, 7], unit='episode')"),
    ("target", Return(), {"target": "Return"}, "Return()"),
    ("target", SequenceReturn(batch_size=4), {"target": "SequenceReturn"}, "SequenceReturn()"),
    ("target", mine, {"target": "test_plain_json.mine"}, "test_plain_json.mine()"),
    (
        *("target", Action([0.5, 1.0], 2), {"target": "Action", "observation": [0.5, 1.0], "action": 2}),
        "Action(observation=[0.5, 1.0], action=2)",
    ),
]


@pytest.mark.parametrize(("kind", "part", "stored", "words"), PARTS, ids=lambda value: str(value)[:20])
def test_parts_are_data_and_have_words(kind, part, stored, words):
    described = {name: value for name, value in describe_part(kind, part).items() if value is not None}
    assert described == stored
    assert show(json.loads(json.dumps(described))) == words


def test_what_differs_is_told_apart():
    many = range(1000)
    parts = [IIF(0.5), IIF(0.25), DTV(unit="row"), DTV(), FromMask(many), FromMask(many[1:]), RandomDrop(like=DTV())]
    texts = [json.dumps(describe_part("rule", part)) for part in parts]
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) < 300  # a thousand ids are a digest
    schedule = describe_part("rule", IIF(math.sqrt))["drop"]
    assert schedule == {"schedule": "function", "name": "math.sqrt"}
    assert show({"rule": "IIF", "drop": schedule}) == "IIF(drop=a schedule: math.sqrt)"
    assert "0x" not in json.dumps(describe_part("target", Mine()))


@pytest.mark.parametrize("value", ["IIF(drop=0.5)", None, 3, [], {}, {"size": "rule"}, {"n": {"rule": "IIF"}}])
def test_other_values_are_shown_as_they_are(value):
    assert show(value) == value


def test_the_package_has_one_name_on_the_index(monkeypatch):
    asked = []

    def version(name):
        asked.append(name)
        if name in ("whence-rl", "torch"):
            return "1.5"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", version)
    packages._read_version.cache_clear()
    try:
        assert library_versions(["whence", "torch", "not-installed"]) == {"whence": "1.5", "torch": "1.5"}
    finally:
        packages._read_version.cache_clear()
    assert asked == ["whence-rl", "torch", "not-installed"]
