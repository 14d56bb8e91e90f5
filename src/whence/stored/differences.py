"""Differences of two runs that should agree: what was changed between them, where their data part, and by what."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray
from torch import Tensor

from whence.core import WhenceError, show
from whence.runs import RunDirectory, find_changes

Kind: TypeAlias = Literal["chance", "setting", "code", "version", "resumption", "parameters", "records", "length"]

_RANKS = (
    *("algorithm", "env", "other_env", "vec_", "VecNormalize", "code", "n_envs", "observation_space", "action_space"),
    *("policy", "hyperparameters", "rule", ""),
)
"""Beginnings of subjects, those that tell most first."""

_REPEATED = "experiment.", "contents.", "names.", "imported."
"""Beginnings of settings that are only shown, or that say again what others, or digests of code, say."""

_LATE = "hyperparameters.", "optimizer", "rule", "target", "objective", "engine", "folds", "last"
_NOT_LATE = ("seed", ".n_steps", ".use_sde", ".sde_sample_freq")
"""Beginnings of settings that act after the first round's steps, and ends of others among them."""

_COLUMNS = (
    *("episode_start", "generator_state", "raw_observation", "observation", "observation_digest", "prompt"),
    *("action_mask", "value", "action", "response", "log_prob", "reward", "end", "info"),
    *("trained_reward", "bootstrap", "round_value", "advantage", "return", "keep", "weight"),
)
_PLACES = {name: place for place, name in enumerate(_COLUMNS)}
_ROUND = _PLACES["trained_reward"]
"""The columns of data in the order in which they are computed, from `trained_reward` on of a whole round."""

_FORMED = ("raw_observation", "observation", "value", "reward", "info", "trained_reward", "advantage", "return")
"""Columns of quantities, which may differ in a simple form."""

_ROUNDING, _FITS = 1e-6, 1e-5
"""Shares of the largest number: what is smaller is rounding, and what a simple form may leave."""


@dataclass(frozen=True)
class Difference:
    """One difference of two runs, A and B.

    Attributes:
        kind: what it is of.
        subject: the setting, library or column that differs.
        text: the difference in a sentence.
        a: what A has; None: nothing.
        b: what B has.
        round: the round in which data part; None: it is no difference of data.
        record_id: the record of A at which they part.
    """

    kind: Kind
    subject: str
    text: str
    a: Any = None
    b: Any = None
    round: int | None = None
    record_id: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs compared: `differences`, what tells most first, and the `rounds` and `records` equal before them."""

    differences: Sequence[Difference]
    rounds: int
    records: int


def compare_runs(a: RunDirectory, b: RunDirectory) -> Comparison:
    """Compare two runs of one kind: their settings, then their data round by round until they part."""
    if a.is_language != b.is_language:
        language, agent = (a, b) if a.is_language else (b, a)
        raise WhenceError(f"{language.path} is of a language model and {agent.path} of an agent: give two of one kind.")
    settings, (data, rounds, records) = sorted(_compare_settings(a, b), key=_rank), _compare_data(a, b)
    if chance := _explain_chance(a, b, settings, data):
        return Comparison(chance, rounds, records)
    # What acts in training explains nothing of the first round's steps, unless that has no end, as off-policy.
    is_early = any(each.round == 1 and _PLACES.get(_base(each.subject), 0) < _ROUND for each in data[:1])
    is_early = is_early and all(run.rounds("policies") for run in (a, b))
    late = [each for each in settings if is_early and each.subject.startswith(_LATE)]
    late = [each for each in late if not each.subject.endswith(_NOT_LATE)]
    return Comparison([*(each for each in settings if each not in late), *data, *late], rounds, records)


def _compare_settings(a: RunDirectory, b: RunDirectory) -> Iterator[Difference]:
    """Yield what differs of configurations, code, versions, and of how the runs were continued."""
    codes = [run.notes.get("code", {}) for run in (a, b)]
    parts = [{name.partition(".")[0] for name in each} for each in codes]
    members = [name for name in find_changes(*codes) if name.partition(".")[0] in parts[0] & parts[1]]
    if members:
        rest = f" and {len(members) - 4} more" if len(members) > 4 else ""
        yield Difference("code", "code", f"The environment's code differs: {', '.join(members[:4])}{rest}.")
    changes = find_changes(a.config, b.config)
    telling = {name: each for name, each in changes.items() if not name.startswith(_REPEATED)}
    # The number of parameters follows from others, and wrappers show a time limit.
    implied = ["parameters"] * (len(telling) > 1) + ["max_episode_steps"] * ("env_wrappers" in telling)
    for name, (old, new) in (telling if telling or members else changes).items():
        if "wrappers" in name and isinstance(old, list) and isinstance(new, list):
            classes = [{part["class"] for part in each} for each in (old, new)]
            lone = [
                {name.rpartition(":")[2] for name in each}
                for each in (classes[0] - classes[1], classes[1] - classes[0])
            ]
            is_clear = lone[0].isdisjoint(lone[1])  # else modules tell them apart
            chains = [{part["class"]: _show_part(part, is_clear) for part in each} for each in (old, new)]
            orders = [" < ".join(each.values()) for each in chains]
            for one, two in [*find_changes(*chains).values()] or [(orders[0], orders[1])]:
                text = f"{one} in A, {two} in B." if two else f"Only A's environments have {one}."
                text = text if one else f"Only B's environments have {two}."
                yield Difference("setting", name, text, one, two)
        elif name not in implied:
            key = name.removeprefix("hyperparameters.")
            yield Difference("setting", name, f"{key} is {_show(old)} in A, {_show(new)} in B.", old, new)
    for name, (old, new) in find_changes(a.versions, b.versions).items():
        if old is not None and new is not None:  # an older run noted fewer
            yield Difference("version", name, f"{name} is {old} in A, {new} in B.", old, new)
    columns = [{*run.round("records", run.rounds()[0]).columns} if run.rounds() else set() for run in (a, b)]
    for label, only in (("A", columns[0] - columns[1]), ("B", columns[1] - columns[0])):
        names = sorted(name for name in only if _PLACES.get(_base(name), _ROUND) < _ROUND)
        if names and all(columns):
            yield Difference("setting", "columns", f"Only records of {label} hold {', '.join(names[:4])}.")
    for label, one, other in (("A", a, b), ("B", b, a)):
        for each in one.notes.get("resumed", []):
            if each not in other.notes.get("resumed", []):
                what = f"{label} was interrupted after round {each['after_round']}, and continued otherwise"
                yield Difference("resumption", label, f"{what}: {each['reason'].rstrip('.')}.")


def _show_part(part: Any, is_clear: bool = True) -> str:
    rest = part.get("kwargs", {key: value for key, value in part.items() if key != "class"})
    name = part["class"].rpartition(":")[2] if is_clear else part["class"].replace(":", ".")
    return f"{name}({', '.join(f'{key}={_show(value)}' for key, value in rest.items())})"


def _show(value: Any) -> str:
    text = "not set" if value is None else str(show(value))
    return text if len(text) <= 60 else f"{text[:60]}…"


def _rank(each: Difference) -> tuple[bool, int, bool]:
    place = next(place for place, begin in enumerate(_RANKS) if each.subject.startswith(begin))
    return each.kind in ("version", "resumption"), place, each.subject.endswith("seed")


def _explain_chance(
    a: RunDirectory, b: RunDirectory, settings: Sequence[Difference], data: Sequence[Difference]
) -> list[Difference]:
    """Return all differences if nothing but seeds or what follows from them differs, and that first; else none."""
    seeds = [each for each in settings if each.subject.endswith("seed")]
    first, *rest = [*seeds[:1], *data] if data and len(seeds) == len(settings) else [None]
    is_seeded = any("hyperparameters.seed" in find_changes({}, run.config) for run in (a, b))
    ways = ["generator_state"] if is_seeded else ["generator_state", "parameters"]
    if first is None or not (seeds or (first.subject in ways and first.round == 1 and not first.record_id)):
        return []
    text = f"They differ only by chance: {first.text[0].lower()}{first.text[1:]}"
    return [replace(first, kind="chance", text=text), *rest]


def _compare_data(a: RunDirectory, b: RunDirectory) -> tuple[list[Difference], int, int]:
    """Compare the rounds that both runs hold until records part; return how, and what was equal before."""
    seen, rounds, records = list[Difference](), 0, 0
    numbers = [number for number in a.rounds() if number in {*b.rounds()}]
    for number in numbers:
        seen += [] if seen else _compare_parameters(a, b, number)
        one, two = (_read_records(run, number) for run in (a, b))
        parting = _compare_records(number, *_align(one, two))
        if len(one) != len(two):
            text = f"Round {number} has {len(one):,} records in A, {len(two):,} in B."
            parting.append(Difference("length", "records", text, len(one), len(two)))
        seen += parting
        if parting:
            break
        rounds, records = (rounds, records) if seen else (rounds + 1, records + len(one))
    counts = [len(run.rounds()) for run in (a, b)]
    seen += _compare_parameters(a, b, numbers[-1] + 1) if numbers and not seen else []
    if counts[0] != counts[1]:
        seen.append(Difference("length", "rounds", f"A has {counts[0]} rounds, B has {counts[1]}.", *counts))
    return seen, rounds, records


def _compare_parameters(a: RunDirectory, b: RunDirectory, number: int) -> list[Difference]:
    """Return in what the policies differ that collect a round."""
    if any(number not in run.rounds("policies") for run in (a, b)):
        return []
    old, new = (run.policy(number) for run in (a, b))
    which = "The initial parameters differ" if number == 1 else f"The parameters after round {number - 1} differ"
    kinds = ({name: f"{str(each.dtype)[6:]} {[*each.shape]}" for name, each in one.items()} for one in (old, new))
    for name, (one, two) in find_changes(*kinds).items():
        text = f"{which} in kind: {name} is {_show(one)} in A, {_show(two)} in B."
        return [Difference("parameters", "dtype", text, one, two, number)]
    changes = {measure_change(old[name], new[name]): name for name in old if old[name].numel()}
    if not (most := max(changes, default=0.0)):
        return []
    text = f"{which}, by at most {most:.2g}, in {changes[most]}."
    return [Difference("parameters", "parameters", text, round=number)]


def measure_change(old: Tensor, new: Tensor) -> float:
    """Return the largest difference of two tensors; infinity if a number is NaN in one of them alone."""
    differs = (old != new) & ~(old.isnan() & new.isnan())
    changes = (old[differs].double() - new[differs].double()).abs()
    return math.inf if changes.isnan().any() else max(changes.tolist(), default=0.0)


def _read_records(run: RunDirectory, number: int) -> pl.DataFrame:
    """Return a round's records, with the generator's state before the reset where an episode begins."""
    table = run.round("records", number)
    if not run.rounds("policies"):  # the critic is that of the round's end
        table = table.rename({"value": "round_value"}, strict=False)
    if number not in run.rounds("episodes") or "episode_start" not in table.columns:
        return table
    states = dict(run.round("episodes", number).select("episode_id", "generator_state").rows())
    for episode, text in states.items():
        state = {key: each for key, each in json.loads(text or "{}").items() if key not in ("wrappers", "last_action")}
        digest = blake2b(json.dumps(state).encode(), digest_size=4).hexdigest() if state else None
        states[episode] = f"seed {state['seed']}" if "seed" in state else digest
    begins = zip(table["episode_id"], table["episode_start"], strict=True)
    column = [states.get(episode) if starts else None for episode, starts in begins]
    return table.with_columns(generator_state=pl.Series(column, dtype=pl.String))


def _align(*rounds: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the steps that both tables hold, in the order of time, with the `place` of each in its environment."""
    keys, place = ["place", "env_index"], pl.int_range(pl.len()).over("env_index").alias("place")
    env = [each["env_index"].fill_null(0) if "env_index" in each.columns else pl.lit(0) for each in rounds]
    tables = [each.with_columns(env_index=one).with_columns(place) for each, one in zip(rounds, env, strict=True)]
    both = tables[0].select(keys).join(tables[1].select(keys), on=keys)
    return [each.join(both, on=keys, how="semi").sort(keys) for each in tables]


def _compare_records(number: int, x: pl.DataFrame, y: pl.DataFrame) -> list[Difference]:
    """Return where the aligned records of a round part, by what, and in which form."""
    names = sorted((name for name in x.columns if name in y.columns and _base(name) in _PLACES), key=_order)
    if any(_base(name) == "observation" for name in names):  # of which digests are kept, too
        names = [name for name in names if name != "observation_digest"]
    masks = {name: mask for name in names if (mask := _mark_differing(x[name], y[name])).any()}
    if not masks:
        return []
    firsts = {name: int(mask.argmax()) for name, mask in masks.items()}
    name = min(firsts, key=lambda each: (_order(each) >= _ROUND, x["place"][firsts[each]], _order(each)))
    record = x.row(firsts[name], named=True)
    old, new = (each[name].slice(firsts[name], 1).to_list()[0] for each in (x, y))
    where = f"round {number}, at record {record.get('record_id')}"
    if record.get("step") is not None:
        where += f" (step {record['step']} of episode {record['episode_id']}"
        where += f", environment {record['env_index']})" if x["env_index"].n_unique() > 1 else ")"
    rest = ", ".join(f"{_label(each)} ({mask.sum():,})" for each, mask in masks.items() if each != name)
    equal = ", ".join(_label(each) for each in names if each not in masks)
    texts = [
        f"They part in {where}, by the {_label(name)}: {_show_values(old, new)}.",
        f"In round {number} it differs in {masks[name].sum():,} of {len(x):,} records"
        f"{_describe_form(name, x, y, masks.get('action'))}.",
        f"Others that differ: {rest or 'none'}. Equal: {equal or 'none'}.",
    ]
    parting = Difference("records", name, texts[0], old, new, number, record.get("record_id"))
    return [parting, *(Difference("records", name, each, round=number) for each in texts[1:])]


def _base(name: str) -> str:
    return name.partition(".")[0]


def _order(name: str) -> int:
    return _PLACES[_base(name)]


def _label(name: str) -> str:
    return name if _base(name) == "info" else name.replace("log_prob", "log-probability").replace("_", " ")


def _mark_differing(old: pl.Series, new: pl.Series) -> NDArray[np.bool_]:
    """Return in which rows two columns differ: in all, if they hold other kinds of values."""
    try:
        return old.ne_missing(new).to_numpy()
    except pl.exceptions.PolarsError:
        return np.ones(len(old), bool)


def _show_values(a: Any, b: Any) -> str:
    """Return the values of a record in words; of several numbers the one that differs most."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return f"{_format(a, b)} in A, {_format(b, a)} in B"
    if len(a) != len(b):
        return f"{len(a)} numbers in A, {len(b)} in B"
    change = np.abs(np.subtract(a, b, dtype=float))
    most, count = int(change.argmax()), np.count_nonzero(change)
    texts = _format(a[most], b[most]), _format(b[most], a[most])
    return f"entry {most} is {texts[0]} in A, {texts[1]} in B ({count} of {len(a)} entries differ)"


def _format(value: Any, other: Any) -> str:
    """Return a value with as many digits as tell it from another."""
    if not (isinstance(value, float) and isinstance(other, float)):
        return str(value).lower() if value is None else _show(value)
    digits = next((each for each in (4, 6, 9) if f"{value:.{each}g}" != f"{other:.{each}g}"), 17)
    return f"{value:.{digits}g}".replace("-", "\N{MINUS SIGN}")


def _describe_form(name: str, x: pl.DataFrame, y: pl.DataFrame, acts: NDArray[np.bool_] | None) -> str:
    """Return how a column differs until actions do: by rounding, a factor, a constant, an info, or by how much."""
    first = [table.filter(place=0)[name].to_list() for table in (x, y)]
    if first[0] != first[1] and sorted(map(repr, first[0])) == sorted(map(repr, first[1])):
        return ": environments are in another order"
    if _base(name) not in _FORMED or pl.String in (x[name].dtype, y[name].dtype):
        return ""
    end = len(x) if acts is None else int(acts.argmax()) + (_order(name) < _PLACES["action"])
    old, new = (np.array(each[name].to_list(), float).reshape(len(x), -1)[:end] for each in (x, y))
    if old.shape != new.shape or not old.size or not np.isfinite(old - new).all():
        return ""
    then, change = "" if acts is None else ", until actions part", np.abs(new - old)
    if change.max() <= _ROUNDING * np.abs(old).max():
        return f": by rounding, at most {change.max():.1g}{then}"
    infos = {each.name: each for table in (y, x) for each in table.get_columns() if _base(each.name) == "info"}
    terms = {f" × {key}": each.cast(pl.Float64).fill_null(0).to_numpy()[:end] for key, each in infos.items()}
    terms = {"": np.ones(len(old)), **(terms if old.shape[1] == 1 else {})}
    fits = {"": _fit(old.ravel(), new.ravel(), {key: np.repeat(each, old.shape[1]) for key, each in terms.items()})}
    if not fits[""]:
        entries = np.flatnonzero(change.max(0))
        fits = {f"entry {entry}: ": _fit(old[:, entry], new[:, entry], terms) for entry in entries}
    if len(fits) <= 3 and all(fits.values()):
        return f": {'; '.join(f'{entry}{fit}' for entry, fit in fits.items())}{then}"
    return f": by {change.mean():.3g} on average, {change.max():.3g} at most{then}"


def _fit(old: NDArray[np.float64], new: NDArray[np.float64], terms: dict[str, NDArray[np.float64]]) -> str | None:
    """Return numbers as a multiple of others, or that and a term, in words; None if they are neither."""
    if not np.ptp(old) and not np.ptp(new) and len(old) > 1:
        return f"{_format(float(old[0]), float(new[0]))} in A, {_format(float(new[0]), float(old[0]))} in B throughout"
    minus = "\N{MINUS SIGN}"
    for key, term in {"none": np.zeros(len(old)), **terms}.items():
        columns = np.stack([old, term], axis=1)
        (factor, rest), *_ = np.linalg.lstsq(columns, new)
        is_enough = len(np.unique(columns, axis=0)) > 1 + (key != "none")
        if is_enough and np.abs(columns @ (factor, rest) - new).max() <= _FITS * np.abs(new).max():
            times = "" if abs(factor - 1) < _FITS else f"{factor:.4g} × ".replace("-", minus)
            return f"B = {times}A" + (f" {'+' if rest > 0 else minus} {abs(rest):.4g}{key}" if key != "none" else "")
    return None
