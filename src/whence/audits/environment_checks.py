"""What is checked of an environment before training: what only play can tell, then what findings read of records."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import polars as pl
from scipy.stats import norm

from whence.audits.play import HORIZON, RESETS, Axis, Episode, Make, Play, digest
from whence.core import add_observations, describe, make_series, named_leaves
from whence.findings.evidence import make_evidence
from whence.findings.finding import CannotTellError, Check, Finding, Rank
from whence.findings.inspection import judge, measure, sort_checks
from whence.findings.reference import read_reference
from whence.sb3.models import SPACES, describe_space
from whence.stored.agents import action_labels, box_action_labels

Said: TypeAlias = list[Finding] | str
"""The findings of a check; where there is none, in words what it looked at."""

_ROUNDING = 1e-3
"""The relative size up to which a difference may be rounding, magnified by a step."""

_FEW = 8
"""States or episodes below which nothing is said that others might contradict."""

_MANY = 24
"""States from which discrete actions are tried at least, since in most many of them do nothing."""

_SHARE = 0.1
"""The share of a range that a policy reaches, or of its draws that are not clipped, below which most of it is lost."""

_ROUND = 2048

_LEFT_OUT = {"spread of actions", "equal rewards"}
"""Detectors of what a policy learned, and of what is looked at in episodes of held actions, too."""


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
    play = Play(env, steps, seconds, on_steps)
    play.run()
    checks = [check for name, look in LOOKS.items() for check in _make_checks(name, look, play)]
    return sort_checks([*checks, *_look_at_records(play)])


def _make_checks(name: str, look: Callable[[Play], Said], play: Play) -> list[Check]:
    try:
        said = look(play)
    except CannotTellError as error:
        return [Check(name, "could not be looked at", f"because {error}")]
    if isinstance(said, str):
        return [Check(name, "fine", said)]
    return [Check(name, each.rank, each.title, each) for each in said]


def _look_at_records(play: Play) -> list[Check]:
    """Run the detectors of findings on random play; what they cannot look at there needs a learner."""
    config = {name: describe(describe_space(getattr(play.env, name))) for name in SPACES}
    config |= {"env": getattr(play.env.spec, "id", None)}
    config |= {"max_episode_steps": getattr(play.env.spec, "max_episode_steps", None)}
    reference = read_reference()
    evidence = make_evidence(_tabulate([each for each in play.random if len(each)]), config, pl.DataFrame())
    if evidence is None:
        return []
    names = reference.keys() - _LEFT_OUT
    measured = {name: one for name, one in measure(evidence).items() if name in names and not one.reason}
    return [
        replace(check, outcome="unusual", finding=replace(check.finding, rank="unusual")) if check.finding else check
        for check in judge(measured, evidence, reference)
    ]


def _tabulate(episodes: Sequence[Episode]) -> pl.DataFrame:
    """Return episodes as the recorder stores them; nothing of an environment that breaks its spaces."""
    seen = [(number, i, one) for number, one in enumerate(episodes) for i in range(len(one))]
    try:
        parts = [dict(named_leaves(one.observations[i], "observation")) for _, i, one in seen]
        digests = [int.from_bytes(digest(one.observations[i]), "little") for _, i, one in seen]
        columns = {
            "record_id": range(len(seen)),
            "round": [1 + row // _ROUND for row in range(len(seen))],
            "env_index": [0] * len(seen),
            "episode_id": [number for number, _, _ in seen],
            "step": [i for _, i, _ in seen],
            "action": make_series("action", np.stack([np.asarray(one.actions[i]) for _, i, one in seen])),
            "reward": [float(one.results[i][0]) for _, i, one in seen],
            "end": [one.end if i + 1 == len(one) else "" for _, i, one in seen],
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
    return [Finding("dynamics", play.error, f"It was after {steps}.", advice)] if play.error else f"none in {steps}"


def look_at_spaces(play: Play) -> Said:
    """Compare each observation with its space."""
    observations = [each for episode in play.episodes for each in episode.observations]
    examples = defaultdict[tuple[Rank, str], list[str]](list)
    for observation in observations:
        for rank, what, example in _list_breaks(play.env.observation_space, observation, "The observation"):
            examples[rank, what].append(example)
    advice = "Let the space say what is returned, or return what the space says: policies are built for the space."
    return [
        Finding("observation", f"{what}, in {len(each):,} of {len(observations):,}", each[0], advice, rank)
        for (rank, what), each in examples.items()
    ] or f"{len(observations):,} observations have the shape, dtype and bounds of their space"


def _list_breaks(space: gym.Space[Any], value: Any, name: str) -> Iterator[tuple[Rank, str, str]]:
    """Yield how a value differs from its space: the rank, what, and an example."""
    array = np.asarray(value if isinstance(space, gym.spaces.Box) else 0)
    if isinstance(space, gym.spaces.Dict) and isinstance(value, Mapping) and value.keys() == space.keys():
        for key, part in space.items():
            yield from _list_breaks(part, value[key], f"{name}'s {key}")
    elif not isinstance(space, gym.spaces.Box):
        if not space.contains(value):
            yield "wrong", f"{name} is not in its space", f"{value!r:.80} is not in {space!s:.80}."
    elif array.shape != space.shape or array.dtype.kind not in "biuf":
        yield "wrong", f"{name} has another shape than its space", f"{array.dtype} {array.shape}, not {space.shape}."
    elif not np.isfinite(array).all():
        yield "wrong", f"{name} holds NaN or infinity", f"It was {array.ravel().tolist()!r:.80}."
    else:
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
        counts.update(f"Info is of type {each.__name__}, and no dict" for each in episode.infos if each is not dict)
        for reward, *flags in episode.results:
            for name, flag in zip(("Terminated", "Truncated"), flags, strict=True):
                if not isinstance(flag, bool | np.bool_):
                    counts[f"{name} is of type {type(flag).__name__}, and no bool"] += 1
            if not isinstance(reward, int | float | np.integer | np.floating):
                counts[f"The reward is of type {type(reward).__name__}, and no number"] += 1
            elif not math.isfinite(reward):
                counts["The reward is NaN or infinite"] += 1
    steps = f"{sum(map(len, play.episodes)):,} steps"
    advice = "Return what `gymnasium.Env.step` promises. Of an int, `~terminated` is true whatever it is."
    return [
        Finding("reward", what, f"It was so {count:,} times in {steps}.", advice) for what, count in counts.items()
    ] or f"rewards are finite numbers, ends bools, infos dicts in {steps}"


def look_at_buffers(play: Play) -> Said:
    """Say what changed in place after it was handed out, or in."""
    findings = []
    advice = "Make a new array at each step, or return a copy: else what a loop keeps is not what happened."
    for name, count in play.overwritten.items():
        title = f"A step changes {name} " + ("that it is given" if name == "the action" else "of the step before")
        rank: Rank = "unusual" if name.startswith("info") else "wrong"  # few loops keep what is in info
        findings.append(Finding("observation", title, f"It was so {count:,} times, in place.", advice, rank))
    return findings or "observations, arrays of info and actions stay as they were"


def look_at_seeds(play: Play) -> Said:
    """Say whether a seed and the same actions repeat an episode."""
    repeats, (step, size) = play.repeats, play.differs
    if not repeats:
        raise CannotTellError("no episode was played twice")
    if repeats["used"] and repeats.get("cross", True):
        return "the same seed and actions give the same episode" + ", in another object too" * ("cross" in repeats)
    where, apart = f"from step {step} on" if step else "from its first observation on", f"{size:.1g} relatively"
    rank: Rank = "wrong"
    advice = "Call `super().reset(seed=seed)` first in reset, and draw from `self.np_random` alone."
    if repeats.get("fresh"):
        title, rank = f"An episode depends on those before it, {where}", "wrong" if size > _ROUNDING else "unusual"
        evidence = f"New objects repeat a seed's episode. Where a used one differs first, it is by {apart}."
        advice = "Let reset set all that step changes; or, where it is rounding, do not expect replays to be exact."
    elif repeats["used"]:
        title, rank = f"Objects that are made alike play different episodes of one seed, {where}", "unusual"
        evidence = f"In one object a seed repeats its episode. Where two differ first, it is by {apart}."
        advice = "Draw in reset, from `self.np_random`; or mean it, if each object is to be another task."
    else:
        is_global = repeats["used seeded"] or repeats.get("fresh seeded", False)
        title = f"A seed does not repeat its episode, {where}"
        title += ": something draws from a global generator" * is_global
        evidence = f"{'It does' if is_global else 'Nor'} if the generators of Python and NumPy are seeded, too."
    return [Finding("dynamics", title, evidence, advice, rank)]


def look_at_starts(play: Play) -> Said:
    """Compare first observations with and without a seed."""
    seeded, unseeded = len({*play.seeded}), len({*play.starts})
    if not unseeded:
        raise CannotTellError("reset raised an error")
    if unseeded > 1 or seeded == 1:
        return f"{unseeded} different starts in {RESETS} resets" if unseeded > 1 else "all are equal"
    if seeded < RESETS / 2:
        raise CannotTellError("starts hardly differ")
    title = f"reset() without a seed returned one start {RESETS} times, though seeds give different ones"
    advice = "Seed the generator only if a seed is given: learners seed once, and then train on a single start."
    return [Finding("episode", title, f"As many seeds gave {seeded} starts.", advice)]


def look_at_ends(play: Play) -> Said:
    """Say if no episode ends, or if episodes end in what reset returns."""
    ended, longest = [episode for episode in play.random if episode.end], max(map(len, play.random), default=0)
    if not ended:
        limit = getattr(play.env.spec, "max_episode_steps", None) or 0
        if limit > longest or not longest:
            raise CannotTellError(f"{longest:,} steps were played at once, and the limit is {limit:,}")
        advice = "Register it with max_episode_steps, or wrap it in `gymnasium.wrappers.TimeLimit`."
        title = f"No episode ends within {longest:,} steps of random actions"
        return [Finding("episode", title, "It has no time limit.", advice, "unusual")]
    starts = {digest(episode.observations[0]) for episode in play.episodes}
    inner = [digest(each) in starts for episode in ended[:100] for each in episode.observations[1:-1]]
    shared = float(np.mean([digest(episode.observations[-1]) in starts for episode in ended]))
    if len(ended) >= _FEW and inner and shared > 0.5 and np.mean(inner) < _SHARE / 2:
        title = f"The last observation of {shared:.0%} of the episodes is one that reset returns"
        advice = "Return what the episode ended in, and leave the next start to reset."
        return [Finding("episode", title, f"Within episodes {np.mean(inner):.1%} are.", advice, "unusual")]
    kinds = Counter(episode.end for episode in ended)
    return f"of {len(ended):,} episodes, " + " and ".join(f"{n:,} {kind}" for kind, n in kinds.items())


def look_at_rewards(play: Play) -> Said:
    """Say whether any reward differs from the others, in random play or where an action is held."""
    texts = [f"{reward!s:.20}" for episode in play.episodes for reward, _, _ in episode.results]
    rewards = ["0.0" if text == "-0.0" else text for text in texts]
    if not rewards:
        raise CannotTellError("no step was played")
    ((value, count),) = Counter(rewards).most_common(1)
    if count < len(rewards):
        return f"{len(rewards) - count:,} of {len(rewards):,} are not {value}"
    lengths = {len(episode) for episode in play.episodes if episode.end == "terminated"}
    if play.episodes[0].results[0][0] and len(lengths) > 1:
        return f"each is {value}, and episodes end earlier or later"
    title = f"Every reward is {value}, in {len(rewards):,} steps of random and of held actions"
    evidence = "Nor does it matter when episodes end: a policy that begins at random sees nothing to learn from."
    advice = "See that the reward can be reached. Then begin episodes nearer to it, or pay on the way."
    return [Finding("reward", title, evidence, advice, "unusual")]


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
        rank: Rank = "unusual" if acts else "wrong"
        title = "No action does anything" + " in most states" * acts
        whole = "differ by their actions, so that some do later" if acts else "are the same, whatever is done"
        evidence += f" Whole episodes of one seed {whole}."
        return [Finding("dynamics", title, evidence, "See that step reads the action, and when it does.", rank)]
    titles = [title for axis, each in zip(play.axes, groups, strict=True) for title in _say_equal(play, axis, each)]
    shown = np.array([[_is_seen(state, step) for step in range(HORIZON)] for state in play.tries])
    if not shown[:, 0].any() and shown.any(axis=1).sum() >= max(_FEW, states / 2):
        titles.append("What an action does is not in the observation after it, but in a later one")
    advice = "See that step reads each value and returns what came of it. If it is meant: leave out what is of no use."
    count = sum(len(axis.values) for axis in play.axes)
    return [
        Finding("dynamics", title, evidence, advice, "unusual") for title in titles
    ] or f"each of {count} values does something else, from {states} states"


def _group(tries: Sequence[Any]) -> list[list[int]]:
    """Return the values of an axis in groups that do the same in all states."""
    groups = defaultdict[str, list[int]](list)
    for i in range(len(tries[0])):
        groups[repr([state[i] for state in tries])].append(i)
    return [*groups.values()]


def _is_seen(state: Sequence[Any], step: int) -> bool:
    """Return whether observations at a step after an action depend on it."""
    return any(len({outcomes[step][0] for outcomes in values if len(outcomes) > step}) > 1 for values in state)


def _differ_later(play: Play) -> bool:
    """Return whether an episode of a held action differs from that of random ones with its seed."""
    by_seed = {episode.seed: episode.list_outcomes() for episode in play.random}
    held_episodes = [episode for episode in play.episodes if episode.is_held]
    pairs = (zip(each.list_outcomes(), by_seed[each.seed], strict=False) for each in held_episodes)
    return any(one != other for pair in pairs for one, other in pair)


def _say_equal(play: Play, axis: Axis, groups: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield which values of an axis do the same: discrete ones, or a quarter of a range."""
    find_names = box_action_labels if axis.place else action_labels
    known = find_names(play.env.spec.id if play.env.spec else None) or []
    if not axis.place:
        names = [known[i] if i < len(known) else str(value) for i, value in enumerate(axis.values)]
        yield from (f"Actions {', '.join(names[i] for i in group)} do the same" for group in groups if len(group) > 1)
        return
    name = known[axis.place[0]] if len(axis.place) == 1 and known else axis.name
    if len(groups) == 1:
        yield f"{name} does nothing"
        return
    for group in groups:
        if len(group) > max(1, len(axis.values) / 4):
            yield f"{name} does the same from {axis.values[group[0]]:g} to {axis.values[group[-1]]:g}"


def look_at_ranges(play: Play) -> Said:
    """Compare ranges of continuous actions with what a fresh policy draws: a normal law of deviation 1."""
    space = play.env.action_space
    if not isinstance(space, gym.spaces.Box):
        return "actions are not continuous"
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    width = np.where(np.isfinite(high - low), high - low, 1)
    reached, likely = (np.clip(2, low, high) - np.clip(-2, low, high)) / width, norm.cdf(high) - norm.cdf(low)
    share = np.minimum(reached, likely)
    i = int(share.argmin())
    if share[i] < _SHARE:
        what = f"reaches {reached[i]:.1%} of it within two deviations, and draws {likely[i]:.1%} within it"
        title = f"Action a{i} is from {low[i]:g} to {high[i]:g}: a new Gaussian policy {what}"
        evidence = f"It begins with mean 0 and deviation 1. Axes like that: {(share < _SHARE).sum()}."
        advice = "Let the environment take actions from −1 to 1 and scale them (`gymnasium.wrappers.RescaleAction`)."
        return [Finding("setting", title, evidence, advice, "unusual")]
    return "a Gaussian policy of deviation 1 suits them"


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
