"""What is checked of an environment before training: what only play can tell, then what findings read of records."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import polars as pl
from scipy.stats import norm

from whence.core import add_observations, describe, make_series, named_leaves
from whence.findings.evidence import make_evidence
from whence.findings.finding import CannotTellError, Check, Finding, Rank
from whence.findings.inspection import judge, measure
from whence.findings.play import HORIZON, RESETS, Axis, Episode, Make, Play, Player, digest
from whence.findings.reference import read_reference
from whence.sb3.models import SPACES, describe_space
from whence.stored.agents import action_labels, box_action_labels

Said: TypeAlias = tuple[list[Finding], str]
"""The findings of a check; in words what it looked at, for where there is none."""

_ROUNDING = 1e-3
"""The relative size up to which a difference may be rounding, magnified by a step."""

_FEW = 8
"""States or episodes below which nothing is said that others might contradict."""

_MANY = 24
"""States from which discrete actions are tried at least, since in most many of them do nothing; and the length of
episodes from which on a length that many of them have is no chance."""

_SHARE = 0.1
"""The share of a range that a policy reaches, or of its draws that are not clipped, below which most of it is lost."""

_ROUND = 2048

_LEARNT = ("spread of actions",)
"""Detectors of what a policy does, which random play does not show."""


def audit(
    env: gym.Env[Any, Any] | Make,
    *,
    steps: int = 20_000,
    seconds: float = 60.0,
    on_steps: Callable[[int, int], None] = lambda done, count: None,
) -> list[Check]:
    """Return what was looked at in an environment before training, and what came of it, what is wrong first.

    It plays random actions, holds single ones, plays episodes twice, and tries actions from the same states. What
    breaks Gymnasium's contract is wrong, what may be meant is unusual. So is what the detectors of findings see in the
    records of random play, since their reference is of training.

    Args:
        env: a function that makes the environment, so that two can be compared; or one, which is left as it is then.
        steps: steps to play at most.
        seconds: seconds to play at most.
        on_steps: called with the steps that are done, and those of the budget.
    """
    play = Player(env, steps, seconds, on_steps).run()
    checks = [check for name, look in LOOKS.items() for check in _make_checks(name, look, play)]
    order = ("wrong", "unusual", "could not be looked at", "fine")
    return sorted([*checks, *_look_at_records(play)], key=lambda check: order.index(check.outcome))


def _make_checks(name: str, look: Callable[[Play], Said], play: Play) -> list[Check]:
    try:
        findings, text = look(play)
    except CannotTellError as error:
        return [Check(name, "could not be looked at", f"because {error}")]
    return [Check(name, each.rank, each.title, each) for each in findings] or [Check(name, "fine", text)]


def _look_at_records(play: Play) -> list[Check]:
    """Run the detectors of findings on random play; what they cannot look at there needs a learner."""
    config = {name: describe(describe_space(getattr(play.env, name))) for name in SPACES}
    config |= {name: getattr(play.env.spec, key, None) for name, key in _OF_SPEC.items()}
    evidence = make_evidence(_tabulate([each for each in play.random if len(each)]), config, pl.DataFrame())
    reference = read_reference()
    checks = [] if evidence is None else judge(measure(evidence), evidence, reference)
    return [
        replace(check, outcome="unusual", finding=replace(check.finding, rank="unusual")) if check.finding else check
        for check in checks
        if check.outcome != "could not be looked at" and check.name in reference and check.name not in _LEARNT
    ]


_OF_SPEC = {"env": "id", "max_episode_steps": "max_episode_steps"}


def _tabulate(episodes: Sequence[Episode]) -> pl.DataFrame:
    """Return episodes as the recorder stores them; nothing of an environment that breaks its spaces."""
    seen = [(number, i, one) for number, one in enumerate(episodes) for i in range(len(one))]
    try:
        parts = [dict(named_leaves(one.observations[i], "observation")) for _, i, one in seen]
        digests = [int.from_bytes(digest(one.observations[i]), "little") for _, i, one in seen]
        columns = {
            "record_id": pl.Series(range(len(seen))),
            "round": pl.Series([1 + row // _ROUND for row in range(len(seen))]),
            "env_index": pl.Series([0] * len(seen)),
            "episode_id": pl.Series([number for number, _, _ in seen]),
            "step": pl.Series([i for _, i, _ in seen]),
            "action": make_series("action", np.stack([np.asarray(one.actions[i]) for _, i, one in seen])),
            "reward": pl.Series([float(one.results[i][0]) for _, i, one in seen]),
            "end": pl.Series([one.end if i + 1 == len(one) else "" for _, i, one in seen]),
            "observation_digest": pl.Series(digests, dtype=pl.UInt64),
        }
        observations = {name: np.stack([np.asarray(each[name]) for each in parts]) for name in parts[0]}
        return add_observations(pl.DataFrame(columns), observations)
    except (IndexError, KeyError, TypeError, ValueError):
        return pl.DataFrame()


def look_at_errors(play: Play) -> Said:
    """Say what was raised."""
    steps = f"{sum(map(len, play.episodes)):,} steps of random and of held actions"
    advice = "Play ends there. Actions of the action space, and those at its ends, have to be allowed."
    return [Finding("dynamics", text, f"It was after {steps}.", advice) for text in play.errors], f"none in {steps}"


def look_at_spaces(play: Play) -> Said:
    """Compare each observation with its space."""
    observations = [each for episode in play.episodes for each in episode.observations]
    counts, examples = Counter[tuple[Rank, str]](), dict[tuple[Rank, str], str]()
    for observation in observations:
        for rank, what, example in _list_breaks(play.env.observation_space, observation, "The observation"):
            counts[rank, what] += 1
            examples.setdefault((rank, what), example)
    advice = "Let the space say what is returned, or return what the space says: policies are built for the space."
    return [
        Finding("observation", f"{what}, in {count:,} of {len(observations):,}", examples[rank, what], advice, rank)
        for (rank, what), count in counts.items()
    ], f"{len(observations):,} observations have the shape, dtype and bounds of their space"


def _list_breaks(space: gym.Space[Any], value: Any, name: str) -> Iterator[tuple[Rank, str, str]]:
    """Yield how a value differs from its space: the rank, what, and an example."""
    if isinstance(space, gym.spaces.Dict) and isinstance(value, Mapping) and value.keys() == space.keys():
        for key, part in space.items():
            yield from _list_breaks(part, value[key], f"{name}'s {key}")
        return
    if not isinstance(space, gym.spaces.Box):
        if not space.contains(value):
            yield "wrong", f"{name} is not in its space", f"{value!r:.80} is not in {space!s:.80}."
        return
    array = np.asarray(value)
    if array.shape != space.shape or array.dtype.kind not in "biuf":
        yield "wrong", f"{name} has another shape than its space", f"{array.dtype} {array.shape}, not {space.shape}."
        return
    if not np.isfinite(array).all():
        yield "wrong", f"{name} holds NaN or infinity", f"It was {array.ravel().tolist()!r:.80}."
        return
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    excess = np.maximum(low - array, array - high)
    if (excess > _ROUNDING**2 * np.maximum(1, np.abs(array))).any():
        i = int(excess.argmax())
        limits = f"from {low.flat[i]:g} to {high.flat[i]:g}"
        yield "wrong", f"{name} leaves its bounds", f"Entry {i} was {array.flat[i]:g}, and may be {limits}."
    if not np.can_cast(array.dtype, space.dtype or array.dtype):
        yield "unusual", f"{name} has another dtype than its space", f"It is {array.dtype}, not {space.dtype}."


def look_at_types(play: Play) -> Said:
    """Compare what `step` and `reset` return with what Gymnasium promises."""
    counts = Counter[str]()
    for episode in play.episodes:
        counts.update(f"info is of type {each.__name__}, and no dict" for each in episode.infos if each is not dict)
        for reward, *flags in episode.results:
            for name, flag in zip(("terminated", "truncated"), flags, strict=True):
                counts[f"{name} is of type {type(flag).__name__}, and no bool"] += not isinstance(flag, bool | np.bool_)
            is_number = isinstance(reward, int | float | np.integer | np.floating)
            counts[f"The reward is of type {type(reward).__name__}, and no number"] += not is_number
            counts["The reward is NaN or infinite"] += is_number and not math.isfinite(reward)
    steps = sum(map(len, play.episodes))
    advice = "Return what `gymnasium.Env.step` promises. Of an int, `~terminated` is true whatever it is."
    return [
        Finding("reward", what[:1].upper() + what[1:], f"It was so {count:,} times in {steps:,} steps.", advice)
        for what, count in counts.items()
        if count
    ], f"rewards are finite numbers, ends bools, infos dicts in {steps:,} steps"


def look_at_buffers(play: Play) -> Said:
    """Say what changed in place after it was handed out, or in."""
    advice = "Make a new array at each step, or return a copy: else what a loop keeps is not what happened."
    titles = {name: f"A step changes {name} of the step before" for name in play.overwritten}
    titles["the action"] = "A step changes the action that it is given"
    return [
        Finding("observation", titles[name], f"It was so {count:,} times, in place.", advice, _rank_array(name))
        for name, count in play.overwritten.items()
    ], "observations, arrays of info and actions stay as they were"


def _rank_array(name: str) -> Rank:
    return "unusual" if name.startswith("info") else "wrong"  # few loops keep what is in info


def look_at_seeds(play: Play) -> Said:
    """Say whether a seed and the same actions repeat an episode."""
    repeats, (step, size) = play.repeats, play.differs
    if not repeats:
        raise CannotTellError("no episode was played twice")
    where = f"from step {step} on" if step else "from its first observation on"
    rank: Rank = "wrong"
    advice = "Call `super().reset(seed=seed)` first in reset, and draw from `self.np_random` alone."
    if repeats["used"] and repeats.get("cross", True):
        return [], "the same seed and actions give the same episode" + ", in another object too" * ("cross" in repeats)
    if repeats.get("fresh"):
        title, rank = f"An episode depends on those before it, {where}", "wrong" if size > _ROUNDING else "unusual"
        evidence = (
            f"New objects repeat a seed's episode. Where a used one differs first, it is by {size:.1g} relatively."
        )
        advice = "Let reset set all that step changes; or, where it is rounding, do not expect replays to be exact."
    elif repeats["used"]:
        title, rank = f"Objects that are made alike play different episodes of one seed, {where}", "unusual"
        evidence = f"In one object a seed repeats its episode. Where two differ first, it is by {size:.1g} relatively."
        advice = "Draw in reset, from `self.np_random`; or mean it, if each object is to be another task."
    elif repeats["used seeded"] or repeats.get("fresh seeded"):
        title = f"A seed does not repeat its episode, {where}: something draws from a global generator"
        evidence = "The episode is the same if the generators of Python and NumPy are seeded, too."
    else:
        title = f"A seed does not repeat its episode, {where}"
        evidence = "Nor if the generators of Python and NumPy are seeded, too."
    return [Finding("dynamics", title, evidence, advice, rank)], ""


def look_at_starts(play: Play) -> Said:
    """Compare first observations with and without a seed."""
    seeded, unseeded = {*play.seeded}, {*play.starts}
    if not unseeded:
        raise CannotTellError("reset raised an error")
    if len(unseeded) > 1 or len(seeded) == 1:
        return [], f"{len(unseeded)} different starts in {RESETS} resets" if len(unseeded) > 1 else "all are equal"
    if len(seeded) < RESETS / 2:
        raise CannotTellError("starts hardly differ")
    title = f"reset() without a seed returned one start {RESETS} times, though seeds give different ones"
    advice = "Seed the generator only if a seed is given: learners seed once, and then train on a single start."
    evidence = f"As many seeds gave {len(seeded)} starts."
    return [Finding("episode", title, evidence, advice)], ""


def look_at_ends(play: Play) -> Said:
    """Say if no episode ends, if all end by `terminated` at one length, or in what reset returns."""
    ended, longest = [episode for episode in play.random if episode.end], max(map(len, play.random), default=0)
    if not ended:
        limit = getattr(play.env.spec, "max_episode_steps", None) or 0
        if limit > longest or not longest:
            raise CannotTellError(f"{longest:,} steps were played at once, and the limit is {limit:,}")
        advice = "Register it with max_episode_steps, or wrap it in `gymnasium.wrappers.TimeLimit`."
        title = f"No episode ends within {longest:,} steps of random actions"
        return [Finding("episode", title, "It has no time limit.", advice, "unusual")], ""
    findings = []
    lengths = Counter(len(episode) for episode in ended)
    last = max(lengths)
    marks = [one.results[-1][1:] for one in ended if len(one) == last]
    near = sum(count for length, count in lengths.items() if 0.8 * last <= length < last)
    if last >= _MANY and len(marks) > max(2, 2 * near) and all(done and not cut for done, cut in marks):
        title = f"{len(marks)} of {len(ended)} episodes end by terminated after {last:,} steps, and none is longer"
        advice = "If that is a time limit, return it as truncated: else what would follow is learnt to be worth 0."
        findings.append(Finding("episode", title, f"{near} are shorter by less than a fifth.", advice, "unusual"))
    starts = {digest(episode.observations[0]) for episode in play.episodes}
    inner = [digest(each) in starts for episode in ended[:100] for each in episode.observations[1:-1]]
    shared = float(np.mean([digest(episode.observations[-1]) in starts for episode in ended]))
    if len(ended) >= _FEW and inner and shared > 0.5 and np.mean(inner) < _SHARE / 2:
        title = f"The last observation of {shared:.0%} of the episodes is one that reset returns"
        advice = "Return what the episode ended in, and leave the next start to reset."
        evidence = f"Within episodes {np.mean(inner):.1%} are."
        findings.append(Finding("episode", title, evidence, advice, "unusual"))
    kinds = Counter(episode.end for episode in ended)
    return findings, f"of {len(ended):,} episodes, " + " and ".join(f"{n:,} {kind}" for kind, n in kinds.items())


def look_at_rewards(play: Play) -> Said:
    """Say whether any reward differs from the others, in random play or where an action is held."""
    rewards = [f"{reward!s:.20}" for episode in play.episodes for reward, _, _ in episode.results]
    if not rewards:
        raise CannotTellError("no step was played")
    ((value, count),) = Counter(rewards).most_common(1)
    if count < len(rewards):
        return [], f"{len(rewards) - count:,} of {len(rewards):,} are not {value}"
    lengths = {len(episode) for episode in play.episodes if episode.end == "terminated"}
    if any(reward for episode in play.episodes[:1] for reward, _, _ in episode.results) and len(lengths) > 1:
        return [], f"each is {value}, and episodes end earlier or later"
    title = f"Every reward is {value}, in {len(rewards):,} steps of random and of held actions"
    evidence = "Nor does it matter when episodes end: a policy that begins at random sees nothing to learn from."
    advice = "See that the reward can be reached. Then begin episodes nearer to it, or pay on the way."
    return [Finding("reward", title, evidence, advice, "unusual")], ""


def look_at_effects(play: Play) -> Said:
    """Compare what each value of the action does from the same states, up to the fourth step after it."""
    states = len(play.tries)
    if not play.axes:
        raise CannotTellError(f"actions are a {type(play.env.action_space).__name__}")
    if not any(play.repeats.values()):
        raise CannotTellError("a seed does not repeat its episode, so that no two actions start from the same state")
    if states < (_FEW if isinstance(play.env.action_space, gym.spaces.Box) else _MANY):
        raise CannotTellError(f"the budget lets all actions be tried from {states} states only")
    evidence = f"They were tried from {states} states, with the same steps after them."
    groups = [_group([state[k] for state in play.tries]) for k in range(len(play.axes))]
    if all(len(each) == 1 for each in groups):
        acts = _differ_later(play)
        title = "No action does anything" + " in most states" * acts
        evidence += (
            " Whole episodes of one seed differ by their actions, so that some do later."
            if acts
            else (" Whole episodes of one seed are the same, whatever is done.")
        )
        rank: Rank = "unusual" if acts else "wrong"
        return [Finding("dynamics", title, evidence, "See that step reads the action, and when it does.", rank)], ""
    titles = [title for axis, each in zip(play.axes, groups, strict=True) for title in _say_equal(play, axis, each)]
    shows = [{h for values in state for h in range(HORIZON) if _count(values, h) > 1} for state in play.tries]
    if not any(0 in each for each in shows) and sum(map(bool, shows)) >= max(_FEW, states / 2):
        titles.append("What an action does is not in the observation after it, but in a later one")
    advice = "See that step reads each value and returns what came of it. If it is meant: leave out what is of no use."
    return [Finding("dynamics", title, evidence, advice, "unusual") for title in titles], (
        f"each of {sum(len(axis.values) for axis in play.axes)} values does something else, from {states} states"
    )


def _group(tries: Sequence[Any]) -> list[list[int]]:
    """Return the values of an axis in groups that do the same in all states."""
    groups: dict[str, list[int]] = {}
    for i in range(len(tries[0])):
        groups.setdefault(repr([state[i] for state in tries]), []).append(i)
    return [*groups.values()]


def _differ_later(play: Play) -> bool:
    """Return whether an episode of a held action differs from that of random ones with its seed."""
    by_seed = {episode.seed: episode.list_outcomes() for episode in play.random}
    held = [episode for episode in play.episodes if episode.held]
    pairs = (zip(each.list_outcomes(), by_seed[each.seed], strict=False) for each in held)
    return any(one != other for pair in pairs for one, other in pair)


def _count(values: Sequence[Any], step: int) -> int:
    """Return how many different observations there are at a step after an axis' values."""
    return len({outcomes[step][0] for outcomes in values if len(outcomes) > step})


def _say_equal(play: Play, axis: Axis, groups: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield which values of an axis do the same: discrete ones, or a quarter of a range."""
    find_names = box_action_labels if axis.place else action_labels
    known = find_names(play.env.spec.id if play.env.spec else None) or []
    if axis.place:
        name = known[axis.place[0]] if len(axis.place) == 1 and known else axis.name
        if len(groups) == 1:
            yield f"{name} does nothing"
            return
        for group in groups:
            if len(group) > max(1, len(axis.values) / 4):
                yield f"{name} does the same from {axis.values[group[0]]:g} to {axis.values[group[-1]]:g}"
        return
    names = [known[i] if i < len(known) else str(value) for i, value in enumerate(axis.values)]
    yield from (f"Actions {', '.join(names[i] for i in group)} do the same" for group in groups if len(group) > 1)


def look_at_ranges(play: Play) -> Said:
    """Compare ranges of continuous actions with what a fresh policy draws: a normal law of deviation 1."""
    space = play.env.action_space
    if not isinstance(space, gym.spaces.Box):
        return [], "actions are not continuous"
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    width = np.where(np.isfinite(high - low), high - low, 1)
    shares = {
        "reaches {:.1%} of it within two deviations": (np.clip(2, low, high) - np.clip(-2, low, high)) / width,
        "draws {:.1%} within it": norm.cdf(high) - norm.cdf(low),
    }
    advice = "Let the environment take actions from −1 to 1 and scale them (`gymnasium.wrappers.RescaleAction`)."
    for what, share in shares.items():
        if share.min() < _SHARE:
            i, count = int(share.argmin()), int((share < _SHARE).sum())
            title = f"Action a{i} is from {low[i]:g} to {high[i]:g}: a new Gaussian policy {what.format(share[i])}"
            evidence = f"It begins with mean 0 and deviation 1, whatever the range is. Axes like that: {count}."
            return [Finding("setting", title, evidence, advice, "unusual")], ""
    return [], "a Gaussian policy of deviation 1 suits them"


LOOKS: Mapping[str, Callable[[Play], Said]] = {
    "errors": look_at_errors,
    "spaces of observations": look_at_spaces,
    "types of what is returned": look_at_types,
    "arrays that change later": look_at_buffers,
    "seeds": look_at_seeds,
    "starts": look_at_starts,
    "ends": look_at_ends,
    "rewards": look_at_rewards,
    "effects of actions": look_at_effects,
    "ranges of actions": look_at_ranges,
}
"""The checks that need play, by their names."""
