"""What is wrong with observations: equal, stopped, lost, repeated, late, clipped, outlying or unscaled ones."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Int
from numpy.typing import NDArray

from whence.findings.evidence import Blocks, Evidence, Mask, Numbers
from whence.findings.finding import CannotTellError, Sight
from whence.findings.history import FEW

_MANY, _SAMPLE = 50, 2000
"""Distinct values, of so many records, from which on a number counts as continuous: none comes twice by chance."""

_MOVES = 20
"""Moves of an entry from which on the longest pause between them says how long it may pause; at least one for each
entry of each environment, as of so many, one pauses for longer than ever by chance."""

_SHARE = 0.05
"""The share of the steps from which on a fault matters to training."""

_RARE = 0.005
"""A tenth of it, which does not matter."""

_FEWEST = 8
"""Steps that a mean is taken of at least."""

_READ = 256
"""Numbers of an image that are read."""

_UNITS = 1e3
"""Sizes that entries have by their units, as metres, volts or degrees do; all may."""

_TAIL = 0.0025
"""The share on either side that a few outlying values may have: not of the range of the rest."""


def look_at_nonfinite(evidence: Evidence) -> Sight:
    """Count the records with a reward or an observation that is NaN or infinite: in decades, from 1 record on 1."""
    mask = ~np.isfinite(evidence.columns["reward"])
    names = ["the reward"] if mask.any() else []
    for name, block in evidence.blocks.items():
        if block.dtype.kind == "f" and (bad := ~np.isfinite(block).all(axis=1)).any():
            mask, names = mask | bad, [*names, name]
    return Sight(
        float(np.log10(10 * mask.sum())) if mask.any() else 0.0,
        "observation" if names[:1] != ["the reward"] else "reward",
        f"Numbers are not finite: {', '.join(names[:4])} in {mask.sum():,} of {len(mask):,} records",
        "They are NaN or infinite.",
        "Find where they arise: a division by 0, an overflow, a sensor without a value. One of them spoils a gradient.",
        mask,
    )


def look_at_equal_observations(evidence: Evidence) -> Sight:
    """Measure the share of the commonest observation of each environment: in nines."""
    is_commonest = select_commonest(evidence)
    return Sight(
        float(np.log10((len(evidence) + 1) / (len(evidence) - is_commonest.sum() + 1))),
        "observation",
        f"The observation is always the same: an environment shows one and the same in {is_commonest.mean():.2%} of "
        f"the records{_say_value(evidence, is_commonest)}",
        "All its numbers or pixels were compared.",
        "Check what `step` returns: an image that is divided before it is cast to integers is black.",
        is_commonest,
    )


def select_commonest(evidence: Evidence) -> Mask:
    """Return which records show their environment's commonest observation."""
    ids, copies = identify(evidence), evidence.columns["env_index"]
    mask = np.zeros(len(ids), dtype=bool)
    for copy in np.unique(copies):
        here = copies == copy
        mask[here] = ids[here] == np.bincount(ids[here]).argmax()
    return mask


def look_at_idle_entries(evidence: Evidence) -> Sight:
    """Find the one entry that never changes within an episode where all others do: in decades of steps.

    Indicators and parameters of the world do not change, either, but come in blocks, or are always the same, not 0.
    """
    entries, pairs = dict(_list_entries(evidence.blocks)), np.flatnonzero(evidence.has_next)
    many = sum(1 for _ in _list_continuous(evidence.blocks))
    if not len(evidence.blocks) == len(entries) <= min(FEW, 2 * many):
        raise CannotTellError(f"half of up to {FEW} numbers have to take many values, and {many} of {len(entries)} do")
    idle = [name for name, values in entries.items() if (values[pairs + 1] == values[pairs]).all()]
    if len(idle) != 1 or (np.ptp(values := entries[idle[0]]) == 0 and values[0]):
        return Sight(0.0)
    same = "never changes within an episode" if values.any() else "is always 0"
    return Sight(
        float(np.log10(max(len(pairs), 1))),
        "observation",
        f"The observation's entry {idle[0]} {same}: in {len(values):,} records; the other {len(entries) - 1} vary",
        "Each step was compared with the one before it.",
        f"Check that {idle[0]} is filled in at each step. If it is a goal that the reset chooses, all is well.",
    )


def look_at_stops(evidence: Evidence) -> Sight:
    """Compare how long an entry has not changed at the end of a copy with the longest pause before: in decades.

    A copy in which it never changes has paused from its start to its end. Of agents of one world, which whence knows
    nothing of, some may have entries without a use.
    """
    copies, best = evidence.columns["env_index"], Sight(0.0)
    starts = np.flatnonzero(np.append(True, copies[1:] != copies[:-1]))
    finals = np.append(starts[1:], len(copies))
    are_agents = len(starts) > 1 and evidence.config.get("env_wrappers") == []
    entries = list(_list_entries(evidence.blocks))
    for name, values in entries:
        moves = np.setdiff1d(1 + np.flatnonzero(values[1:] != values[:-1]), starts, assume_unique=True)
        edges = np.sort(np.concatenate([moves, starts, finals[-1:]]))
        pauses, is_final = np.diff(edges), np.isin(edges[1:], finals)
        is_last = is_final & ~(are_agents & np.isin(edges[:-1], starts))
        if len(moves) < max(_MOVES, len(entries) * len(starts)) or not is_last.any():
            continue
        longest, usual = int(pauses[is_last].max()), int(pauses[~is_final].max())
        if (decades := float(np.log10(longest / usual))) > best.statistic:
            at = int(edges[:-1][is_last][pauses[is_last].argmax()])
            best = Sight(
                decades,
                "observation",
                f"The observation's entry {name} stops: it never changes in the last {longest:,} records of "
                f"environment {copies[at]:.0f}, where it paused for {usual:,} at most",
                "Pauses of all environments were compared.",
                f"Check that {name} is filled in at each step.",
                np.isin(np.arange(len(copies)), np.arange(at, at + longest)),
            )
    return best


def look_at_lost_entries(evidence: Evidence) -> Sight:
    """Look for an exact value that an entry jumps to now and then.

    In nines, how much of an entry's squared movement goes there and back at once; or in decades, how often the entry
    comes to a value amid the others, against the next such value: there jumps are small, and no bound holds it. Less
    so where it stays there more or less often than what comes at random does.
    """
    entries, inside, best = list(_list_continuous(evidence.blocks)), _list_inner(evidence), Sight(0.0)
    if not entries:
        raise CannotTellError("no entry is continuous")
    for name, values in entries:
        distinct, ids = np.unique(values, return_inverse=True)
        low, high = np.quantile(values, [0.25, 0.75])  # amid the others
        visits = _count_visits(ids, inside)
        amid = int(np.where((distinct > low) & (distinct < high), visits, -1).argmax())
        # Jumps from one value to another of an episode, and the next ones, back again.
        changes = 1 + np.flatnonzero(evidence.has_next[:-1] & (values[1:] != values[:-1]))
        jumps, joined = values[changes] - values[changes - 1], np.diff(evidence.episodes[changes]) == 0
        there, back = jumps[:-1][joined], jumps[1:][joined]
        returned = np.where(there * back < 0, np.minimum(there**2, back**2), 0.0)
        movement = np.bincount(ids[changes[:-1][joined]], returned, len(distinct)) * (visits > 0)
        nines = -np.log10(max(1 - 2 * movement.max() / max((jumps**2).sum(), 1e-300), 1e-9))
        for statistic, at in ((nines, movement.argmax()), (_compare_counts(visits, amid, len(ids)), amid)):
            mask = ids == at
            stays, expected = 1 + (mask[inside] & mask[inside - 1]).sum(), 1 + mask[inside].sum() * mask.mean()
            random = float(statistic) * min(stays, expected) / max(stays, expected)
            if random > best.statistic and mask.sum() >= _FEWEST:
                best = Sight(
                    random,
                    "observation",
                    f"The observation's entry {name} is lost now and then: in {mask.mean():.1%} of the records it "
                    f"jumps to exactly {distinct[at]:.4g}",
                    "Its other values hardly come twice, or lie near those before and after.",
                    f"Check what fills {name} in: a default where a message is missing, a sensor that drops out.",
                    mask,
                )
    return best


def look_at_lost_observations(evidence: Evidence) -> Sight:
    """Compare how often one observation comes now and then with the next such observation: in decades."""
    ids = identify(evidence)
    counts = _count_visits(ids, _list_inner(evidence))
    mask = ids == counts.argmax()
    return Sight(
        _compare_counts(counts, int(counts.argmax()), len(ids)),
        "observation",
        f"The observation is lost now and then: in {mask.mean():.1%} of the records, it is one and the same"
        f"{_say_value(evidence, mask)}",
        f"It comes and goes; no other does so more than {np.sort(counts)[-2:][0]:,} times.",
        "Check what is returned where a message or a picture is missing.",
        mask,
    )


def look_at_repeats(evidence: Evidence) -> Sight:
    """Measure by how much more than usual an observation moves after it was exactly as before.

    Where something stands still, the next move is no larger than others; where an old observation was shown, it is
    that of two steps. Continuous entries and images move by their mean absolute change; the median over them counts.
    """
    identify(evidence)  # raises where observations are of few states
    inside, numbers, blocks = _list_inner(evidence), dict(_list_continuous(evidence.blocks)), evidence.blocks
    parts = [block for name, block in blocks.items() if name in numbers or block.shape[1] > 1]
    if not parts:
        raise CannotTellError("no entry is continuous" if blocks else "observations are not stored")
    pairs = np.flatnonzero(evidence.has_next)
    # What never changes within an episode tells no state; one that comes at several times may last.
    seen = [block for block in blocks.values() if (block[pairs] != block[pairs + 1]).any()] or parts
    ids = np.unique(_hash(seen), return_inverse=True)[1]
    visits = np.bincount(ids[np.append(True, ids[1:] != ids[:-1])])[ids[inside]]
    repeats, moves = (ids[inside] == ids[inside - 1]) & (visits == 1), ids[inside] != ids[inside + 1]
    if (repeats & moves).sum() < _FEWEST:
        return Sight(0.0)
    excess = []
    for block in parts:
        part = block[:, :: -(-block.shape[1] // _READ)].astype(np.float64)
        change = np.abs(part[inside + 1] - part[inside]).mean(axis=1)
        late, usual = change[repeats & moves].mean(), change[~repeats & moves].sum() / max(1, (~repeats & moves).sum())
        if late > 0:
            excess.append(min(1.0, late / usual - 1) if usual else 1.0)
    made_up = float(np.median(excess or [0.0]))
    return Sight(
        max(0.0, made_up) * min(1.0, float(repeats.mean()) / _SHARE),
        "observation",
        f"An old observation is shown again in {repeats.mean():.1%} of the steps: all of it is exactly as before, and "
        f"the next move is {1 + made_up:.3g} times the usual one",
        "Where something only stands still, the next move is no larger than others.",
        "Check that each step returns a new observation, made after the action: no copy of the last one.",
        np.isin(np.arange(len(ids)), inside[repeats]),
    )


def look_at_late_observations(evidence: Evidence) -> Sight:
    """Compare how many episodes' second observation is their first with what other repeats let expect: in decades."""
    ids, rows = identify(evidence), np.flatnonzero(evidence.has_next)
    repeats, is_first = ids[rows] == ids[rows + 1], evidence.columns["step"][rows] == 0
    # Of all episodes: one that lasts for a second step only where the first did nothing has such a second observation.
    count, late = int((evidence.columns["step"] == 0).sum()), int(repeats[is_first].sum())
    usual = float(repeats[~is_first].mean()) if not is_first.all() else 0.0
    return Sight(
        compare_firsts(late, count, usual),
        "observation",
        f"The observation is late, by a step or more: the second one of {late:,} of {count:,} episodes is their first",
        f"Of later steps {usual:.2%} repeat the observation.",
        "Return the observation after the action, not the one before it.",
        np.isin(np.arange(len(ids)), rows[is_first & repeats] + 1),
    )


def compare_firsts(late: int, episodes: int, usual: float) -> float:
    """Return how far nearly all episodes begin as if late, and how far beyond a usual share: in decades."""
    all_of_them, beyond = (episodes + 1) / (episodes - late + 1), (late + 1) / (episodes * usual + 1)
    return max(0.0, float(np.log10(min(all_of_them, beyond))))


def look_at_clipped_observations(evidence: Evidence) -> Sight:
    """Measure which share of the values lies at either end of an entry's range: the mean over continuous entries.

    An end that the space declares is no fault, nor is one at 0, or one that an action at its bound sets. VecNormalize's
    `clip_obs` is one.
    """
    pairs, actions = np.flatnonzero(evidence.has_next), evidence.actions
    actions = actions if actions.ndim > 1 else np.zeros((len(actions), 0))  # discrete ones have no bounds
    at_bounds = (actions == actions.min(axis=0)) | (actions == actions.max(axis=0))
    limits, texts, shares = _list_limits(evidence.config.get("observation_space")), [], []
    clip, usual = (evidence.config.get("VecNormalize") or {}).get("clip_obs"), (~at_bounds[pairs]).mean(axis=0)
    for blocks in (evidence.blocks, evidence.normalised):
        by_entry = {"": 0.0}
        for name, values in _list_continuous(blocks):
            ends = [end for end in (values.min(), values.max()) if end and not np.isclose(end, limits, rtol=1e-5).any()]
            if blocks is not evidence.blocks:
                ends = [-clip, clip] if clip else []
            hits = np.stack([np.abs(values - end) <= 1e-8 + 1e-6 * abs(end) for end in ends or [np.inf]], axis=1)
            free = ~at_bounds[pairs[hits[pairs + 1].any(axis=1)]]  # the axes that are not at a bound where it comes
            is_set = len(free) > 0 and bool((free.mean(axis=0) < _SHARE * usual).any())
            by_entry[name] = 0.0 if len(ends) < 2 or is_set else float(hits.mean(axis=0).min())
        shares.append(sum(by_entry.values()) / max(1, len(by_entry) - 1))
        worst = max(by_entry, key=lambda name: by_entry[name])
        texts.append(f"{worst} in {by_entry[worst]:.1%} at either end")
        if blocks is evidence.blocks and len(by_entry) == 1:
            raise CannotTellError("no entry is continuous")
    at = int(np.argmax(shares))
    return Sight(
        float(shares[at]),
        "observation",
        f"The observation is clipped at a bound{' (`clip_obs`)' if at else ''}: {shares[at]:.1%} of its values lie "
        f"exactly at either end of their range, of {texts[at]}",
        "Entries of many values were looked at, whose ends the observation space does not declare.",
        "Widen the bound: states beyond it look the same to the policy.",
    )


def look_at_outlying_observations(evidence: Evidence) -> Sight:
    """Compare an entry's largest distance from its median with the range of the rest: in decades."""
    best = Sight(0.0)
    for name, values in _list_continuous(evidence.blocks):
        low, middle, high = np.quantile(values, [_TAIL, 0.5, 1 - _TAIL])
        away = np.abs(values - middle)
        if high > low and (decades := float(np.log10(away.max() / (high - low)))) > best.statistic:
            mask = away > 10 ** (decades / 2) * (high - low)
            best = Sight(
                decades,
                "observation",
                f"The observation's entry {name} has outlying values: {values[away.argmax()]:.4g} where all but a few "
                f"lie between {low:.4g} and {high:.4g}",
                f"{mask.sum():,} records have such values.",
                "Check where they come from; one of them outweighs a minibatch, and the statistics of VecNormalize.",
                mask,
            )
    return best


def look_at_scales(evidence: Evidence) -> Sight:
    """Compare the size of the largest entry as the policy sees it with the next largest, and with units: in decades."""
    entries = dict(_list_entries(evidence.normalised or evidence.blocks))
    if len(entries) < 2:
        raise CannotTellError("observations are images, of few states, or a single number")
    sizes = {name: float(np.sqrt((values.astype(np.float64) ** 2).mean())) for name, values in entries.items()}
    name, second = sorted(sizes, key=lambda each: -sizes[each])[:2]
    return Sight(
        float(max(0.0, np.log10(max(sizes[name], 1.0) / np.clip(sizes[second], 1.0, _UNITS)))),
        "observation",
        f"The observation is not scaled: {name} is as large as {sizes[name]:.3g} as the policy sees it, the next "
        f"largest, {second}, as {sizes[second]:.3g}",
        "Sizes are root mean squares; networks begin with weights for inputs of about 1.",
        "Scale it in the environment, or train with VecNormalize.",
    )


def has_few_states(evidence: Evidence) -> bool:
    """Return whether observations are discrete, or a single number, which may come again for good reasons."""
    space = evidence.config.get("observation_space") or {}
    is_number = sum(block.shape[1] for block in evidence.blocks.values()) == 1
    return is_number or space.get("type") in ("Discrete", "MultiDiscrete", "MultiBinary")


def identify(evidence: Evidence, *, of_few: bool = False) -> Int[np.ndarray, " n"]:
    """Return a number of each record's whole observation, equal where these are."""
    if has_few_states(evidence) and not of_few:
        raise CannotTellError("observations are of few states, or a single number")
    digests = evidence.digests
    if digests is None and evidence.blocks:
        digests = _hash(list(evidence.blocks.values()))
    if digests is None:
        raise CannotTellError("observations are not stored")
    return np.unique(digests, return_inverse=True)[1]


def _hash(blocks: list[NDArray[Any]]) -> NDArray[Any]:
    return pl.DataFrame(np.hstack(blocks)).hash_rows().to_numpy()


def _list_inner(evidence: Evidence) -> Int[np.ndarray, " k"]:
    """Return the records that have one of their episode before and one after."""
    return 1 + np.flatnonzero(evidence.has_next[1:-1] & evidence.has_next[:-2])


def _list_entries(blocks: Blocks) -> Iterator[tuple[str, NDArray[Any]]]:
    """Return the parts that are a number each."""
    return ((name, values[:, 0]) for name, values in blocks.items() if values.shape[1] == 1)


def _list_continuous(blocks: Blocks) -> Iterator[tuple[str, Numbers]]:
    """Return the parts that are a number of many values each."""
    for name, values in _list_entries(blocks):
        if len(np.unique(values[:: -(-len(values) // _SAMPLE)])) >= _MANY:
            yield name, values.astype(np.float64)


def _count_visits(ids: Int[np.ndarray, " n"], inside: Int[np.ndarray, " k"]) -> Int[np.ndarray, " m"]:
    """Return how often each value comes, less how often it stays: what stays is a state of the world."""
    arrives = ids[inside] != ids[inside - 1]
    visits, records = (np.bincount(ids[rows], minlength=ids.max() + 1) for rows in (inside[arrives], inside))
    return np.asarray(np.maximum(2 * visits - records, 0))


def _compare_counts(counts: Int[np.ndarray, " k"], at: int, records: int) -> float:
    """Return how much larger a count is than any other, and than what is too rare to matter: in decades."""
    others = max(int(np.delete(counts, at).max(initial=0)), _RARE * records, 1)
    return max(0.0, float(np.log10(max(counts[at], 1) / others)))


def _say_value(evidence: Evidence, mask: Mask) -> str:
    values = np.concatenate([block[mask.argmax()] for block in evidence.blocks.values()] or [np.zeros(0)])
    return f", all {values[0]:.3g}" if len(values) and (values == values[0]).all() else ""


def _list_limits(space: Any) -> NDArray[np.float64]:
    """Return the finite limits of a stored space's numbers."""
    if not isinstance(space, Mapping):
        return np.zeros(0)
    inner = space.get("spaces")
    parts = inner.values() if isinstance(inner, Mapping) else ()
    limits = [np.asarray(space.get(end, "inf"), dtype=np.float64).ravel() for end in ("low", "high")]
    values = np.concatenate([*limits, *map(_list_limits, parts)])
    return np.asarray(values[np.isfinite(values)], dtype=np.float64)
