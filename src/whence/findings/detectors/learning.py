"""How a run learns: from which rewards, by which steps, and what its critic knows."""

import numpy as np
import polars as pl
from scipy import stats

from whence.findings.detectors.models import expand, predict_each
from whence.findings.evidence import Evidence, Numbers
from whence.findings.finding import CannotTellError, Sight

_LEAST_ROUNDS, _LEAST_EPISODES = 8, 16
"""Rounds and episodes that a statement on the end of a run needs: a critic begins with nothing."""

_FEW = 0.001
"""The share of the rewards at most that are few: two of a round of 2,048 records."""

_REACH = 2.0
"""How far Adam can move a weight, its updates times its rate, before a lag is a fault: weights have sizes of about 1,
and a layer of `_WIDTH` units moves values by so many times as much, as far as to the size of returns.
"""

_WIDTH = 64
"""Random features of the regression that the critic is compared with: as many as a layer of SB3's critic has."""

_LARGE = 1e3
"""Returns that are far beyond what a critic begins with: its values are of about 1."""

_USUAL = 0.02
"""Divergence of a round, in nats: amid 0.006 and 0.06, where PPO's best learning rates lay in nine environments.

Source: results/practice, tables.md, "Divergence a round at fixed learning rates".
"""

_LEAST_GAMMA, _LEAST_RATE, _LARGEST_RATE, _LARGEST_ENTROPY, _FEWEST = 0.9, 2e-5, 1e-3, 0.01, 256
"""The range of RL Baselines3 Zoo's settings of PPO (hyperparams/ppo.yml); three of them have fewer records a round."""

_FORGOTTEN = 0.01
"""A weight that is next to nothing."""

_NORMALISE = "Divide the rewards, or let `VecNormalize(norm_reward=True)` do it."


def look_at_outliers(evidence: Evidence) -> Sight:
    """Find a few rewards that are far beyond all others: the widest gap below them, in decades.

    Last rewards of episodes are none of them: what ends an episode may pay a lot, and rarely. But the few are compared
    with the usual reward, where rewards are rare.
    """
    rewards, rounds = evidence.columns["reward"], evidence.columns["round"]
    if not evidence.has_next.any():
        raise CannotTellError("episodes have one step")
    middle = float(np.median(rewards[evidence.has_next]))
    distance, most = np.abs(rewards - middle), 2 + int(_FEW * len(rewards))
    paid = distance[distance > 0]
    if not middle and len(paid) < most and (not len(paid) or np.ptp(paid) == 0):
        raise CannotTellError("nearly all rewards are 0, the others alike")
    usual = max(abs(middle), float(np.median(paid)) if len(paid) else 0.0)
    distance = np.where(evidence.has_next, distance, 0.0)
    tail = np.maximum(np.sort(distance)[::-1][:most], usual)
    gaps = np.log10(tail[:-1] / tail[1:])
    few = int(gaps.argmax()) + 1
    at = int(distance.argmax())
    return Sight(
        float(gaps.max()),
        "reward",
        f"A reward of {rewards[at]:.3g} is an outlier: of {evidence.has_next.sum():,} inside of episodes, all "
        f"but {few} are within {tail[few]:.3g} of {middle:.3g}; record {evidence.columns['record_id'][at]:.0f} of "
        f"round {rounds[at]:.0f}",
        "Advantages of the records before it hold it, too: scores say little there, and a selection may keep it.",
        "Look for what paid such a spike. If it is meant, clip: `VecNormalize(clip_reward=10)`.",
        distance > tail[few],
    )


def look_at_equal_rewards(evidence: Evidence) -> Sight:
    """Count the episodes without another return where all rewards are equal: in decades."""
    returns = np.bincount(evidence.episodes, evidence.columns["reward"])[evidence.is_whole]
    if not len(returns):
        raise CannotTellError("no episode ended")
    rewards = evidence.columns["reward"]
    is_equal = rewards.min() == rewards.max() and returns.min() == returns.max()
    return Sight(
        float(np.log10(len(returns))) if is_equal else 0.0,
        "reward",
        f"No other reward than {rewards[0]:.3g} was seen in {len(evidence):,} records: nothing can be learned",
        f"All {len(returns):,} episodes have the return {returns.max(initial=0):.3g}.",
        "If no action so far reached what pays, pay for coming nearer, or explore more; if one did, see what "
        "the reward is read from.",
    )


def look_at_loops(evidence: Evidence) -> Sight:
    """Compare episodes that are paid again and again at one place with those that reach an end: in doublings."""
    rewards, steps, episodes = evidence.columns["reward"], evidence.columns["step"], evidence.episodes
    inner = rewards[evidence.has_next & (steps > 0)]
    if not len(inner) or not evidence.state.shape[1]:
        raise CannotTellError("the observation is unknown" if len(inner) else "episodes have one step")
    is_last = (evidence.ends != "") & evidence.is_whole[episodes]
    # A goal pays more than nearly any step, before the time is over.
    pays = rewards > np.quantile(inner, 0.995)
    reached = is_last & (evidence.ends != "truncated") & (steps < evidence.last_step) & pays
    runs_on = is_last & ~reached & (steps >= 0.9 * evidence.last_step)
    if min(reached.sum(), runs_on.sum()) < _LEAST_ROUNDS:
        raise CannotTellError("not enough episodes both reach an end that pays and run to the limit")
    totals = np.bincount(episodes, rewards)
    with_end, without = (float(np.median(totals[episodes[each]])) for each in (reached, runs_on))
    # Gains where the episode had one before: states that are alike to half a standard deviation.
    gains = np.flatnonzero(np.isin(episodes, episodes[runs_on]) & (rewards > 0))
    places = np.column_stack([episodes, np.round(2 * evidence.state)]).astype(np.int64)[gains]
    again = np.delete(gains, np.unique(places, axis=0, return_index=True)[1])
    share = float(rewards[again].sum() / max(rewards[gains].sum(), 1e-12))
    return Sight(
        float(np.log2(without / with_end)) if share >= 0.5 and without > with_end > 0 else 0.0,
        "reward",
        f"A reward of {np.median(rewards[again]) if len(again) else 0:.2g} is collected again and again at the same "
        f"place: episodes without an end earn {without:.3g}, those that reach one {with_end:.3g}",
        f"In {runs_on.sum():,} episodes that run to the limit, {share:.0%} of the gains are paid where the episode was "
        "paid before.",
        "Pay for progress once, or by a difference of potentials, so that going round in a loop earns nothing.",
        np.isin(np.arange(len(evidence)), again),
    )


def look_at_critic(evidence: Evidence) -> Sight:
    """Compare the critic, late in the run, with a fresh regression on the observation, fitted on other episodes.

    By the share of the return's variance that each explains, whatever the scale and the offset of the critic.
    """
    rounds, settings, metrics = evidence.columns["round"], evidence.config.get("hyperparameters", {}), evidence.metrics
    returns, values = (evidence.columns[name] for name in ("return", "value"))
    if not np.isfinite(returns + values).all() or not evidence.state.shape[1]:
        raise CannotTellError("records have no observation, value or return")
    batches = settings.get("n_steps", 0) * evidence.config.get("n_envs", 1) / settings.get("batch_size", np.inf)
    updates = _read_metric(metrics, "train/n_updates").max(initial=0) * batches
    reach = updates * _read_metric(metrics, "train/learning_rate").max(initial=0)
    late = rounds > np.quantile(np.unique(rounds), 2 / 3)
    if not late.any():
        raise CannotTellError("there is one round")
    episodes, returns, values = evidence.episodes[late], returns[late], values[late]
    size = float(np.sqrt((returns**2).mean()))
    if reach < max(_REACH, size / _WIDTH):
        raise CannotTellError(f"the critic had few updates for returns of size {size:.2g}")
    if len(np.unique(episodes)) < _LEAST_EPISODES or returns.std() < 1e-9:
        raise CannotTellError("late episodes are few, or all alike")
    fresh = predict_each(expand(evidence.state[late], _WIDTH), returns[:, None], episodes)[:, 0]
    knows = float(np.corrcoef(returns, values)[0, 1] ** 2) if values.std() > 1e-9 else 0.0
    may_know = 1 - float(((returns - fresh) ** 2).mean() / returns.var())
    return Sight(
        max(0.0, may_know - knows),
        "critic",
        f"The critic lags: it explains {knows:.0%} of the return's variance in the last third of the rounds; a "
        f"regression on the observation explains {may_know:.0%}",
        f"The critic's values are {values.mean():.3g} ± {values.std():.2g}, returns {returns.mean():.3g} ± "
        f"{returns.std():.2g}; the regression was fitted on other episodes, so the observation is enough.",
        f"Raise `n_epochs`, `learning_rate` or `vf_coef`. {_NORMALISE}",
        late,
    )


def look_at_small_steps(evidence: Evidence) -> Sight:
    """Compare the divergence of larger rounds with a usual one: in decades below it."""
    kl = float(np.quantile(_read_divergence(evidence), 0.9))  # a converged policy moves little, but moved before
    returns = evidence.columns.get("return", np.zeros(0))  # logs have none
    returns = returns[np.isfinite(returns)]
    size = float(np.sqrt((returns**2).mean())) if len(returns) else 0.0
    large = size >= _LARGE
    return Sight(
        max(0.0, float(np.log10(_USUAL / max(kl, 1e-12)))),
        "reward" if large else "setting",
        f"{'Rewards are large, and the' if large else 'The'} policy hardly moves: by {kl:.2g} nats a round"
        f"{f'; returns are of size {size:.2g}' if size else ''}{_say_rate(evidence)}",
        f"In nine of ten rounds it moves by less; about {_USUAL} is usual. Large returns have this effect: the "
        "critic's squared error then takes nearly all of the gradient that `max_grad_norm` leaves to both.",
        _NORMALISE if large else "Raise `learning_rate`.",
    )


def look_at_large_steps(evidence: Evidence) -> Sight:
    """Compare the divergence of a median round with a usual one: in decades above it."""
    kl = float(np.median(_read_divergence(evidence)))
    return Sight(
        max(0.0, float(np.log10(max(kl, 1e-12) / _USUAL))),
        "setting",
        f"Updates throw the policy about: by {kl:.2g} nats a round{_say_rate(evidence)}",
        f"About {_USUAL} is usual.",
        "Lower `learning_rate` or `n_epochs`.",
    )


def _say_rate(evidence: Evidence) -> str:
    rate = evidence.config.get("hyperparameters", {}).get("learning_rate")
    return f"; the learning rate is {rate:g}" if isinstance(rate, int | float) else ""


def _read_divergence(evidence: Evidence) -> Numbers:
    """Return the divergence of each round but the first, which may begin anywhere."""
    metrics, settings = evidence.metrics, evidence.config.get("hyperparameters", {})
    if settings.get("n_epochs") == 1 and "kept" in metrics.columns:
        # SB3 measures divergence before each step, so in a round of one step it is 0.
        metrics = metrics.filter(metrics["kept"] > settings["batch_size"])
    values = _read_metric(metrics, "train/approx_kl")[1:]
    if len(values) < _LEAST_ROUNDS // 2:
        raise CannotTellError("too few rounds have a divergence" if len(values) else "no divergence was logged")
    return values


def _read_metric(metrics: pl.DataFrame, name: str) -> Numbers:
    if name not in metrics.columns:
        return np.zeros(0)
    return metrics[name].drop_nulls().cast(pl.Float64).to_numpy()


def look_at_entropy(evidence: Evidence) -> Sight:
    """Measure how much of the policy's entropy went though the return did not rise: in decades."""
    entropy = -_read_metric(evidence.metrics, "train/entropy_loss")
    returns = _read_metric(evidence.metrics, "episode_return")
    returns = returns[np.isfinite(returns)]
    if min(len(entropy), len(returns)) < _LEAST_ROUNDS:
        raise CannotTellError("too few rounds have an entropy and a return")
    first, last = float(entropy[0]), float(np.median(entropy[-len(entropy) // 4 :]))
    if evidence.actions.ndim == 1:
        lost = float(np.log10(max(first, 1e-12) / max(last, 1e-12)))
    else:
        lost = (first - last) / evidence.actions.shape[1] / float(np.log(10))  # of the deviation of an axis
    early, late = returns[: len(returns) // 4], returns[-len(returns) // 2 :]
    has_risen = stats.mannwhitneyu(late, early, alternative="greater").pvalue < 0.05  # an entropy that pays is learning
    return Sight(
        0.0 if has_risen else max(0.0, lost),
        "setting",
        f"The policy's entropy fell from {first:.3g} to {last:.2g}, and the return did not rise: it was "
        f"{np.median(early):.3g} in the first quarter of the rounds, and {np.median(late):.3g} in the last half",
        "A policy that no longer explores finds nothing better.",
        "Raise `ent_coef`, or lower `learning_rate`.",
    )


def look_at_settings(evidence: Evidence) -> Sight:
    """Compare settings with the range of RL Baselines3 Zoo's: in doublings, or in decades beyond tenfold."""
    settings, copies = evidence.config.get("hyperparameters", {}), evidence.config.get("n_envs")
    steps, gamma, entropy = (settings.get(name) for name in ("n_steps", "gamma", "ent_coef"))
    # A2C's rounds are short on purpose.
    if settings.get("n_epochs") is None or not isinstance(steps, int) or not isinstance(copies, int):
        raise CannotTellError("the run is not PPO's, or its settings are not known")
    rates = _read_metric(evidence.metrics, "train/learning_rate")
    rate = float(rates.max()) if len(rates) and rates.max() > 0 else _LARGEST_RATE
    zoo = "RL Baselines3 Zoo's settings of PPO have"
    lengths = np.bincount(evidence.episodes)[evidence.is_whole]
    length = float(np.median(lengths)) if len(lengths) else 0.0
    texts = {
        f"Rounds are too short: {steps} steps of {copies} environments are {steps * copies} records": (
            float(np.log2(_FEWEST / (steps * copies))),
            f"The gradient of so few is noisy. Nearly all of {zoo} {_FEWEST} or more.",
            "Raise `n_steps`, to 512 or more.",
        ),
        f"The learning rate {rate:g} is too {'high' if rate >= _LEAST_RATE else 'low'}": (
            float(np.log10(max(rate / _LARGEST_RATE, _LEAST_RATE / rate))) - 1,
            f"{zoo} {_LEAST_RATE:g} to {_LARGEST_RATE:g}.",
            f"{'Lower' if rate >= _LEAST_RATE else 'Raise'} `learning_rate`: SB3's default is 3e-4.",
        ),
    }
    if isinstance(entropy, int | float) and entropy > 0 and settings.get("normalize_advantage", True):
        texts[f"The bonus for entropy is too high: `ent_coef` is {entropy:g}"] = (
            float(np.log10(entropy / _LARGEST_ENTROPY)) - 1,
            f"It outweighs advantages, which are divided by their deviation. {zoo} {_LARGEST_ENTROPY:g} or less.",
            "Lower `ent_coef`: SB3's default is 0.",
        )
    if isinstance(gamma, int | float) and gamma < _LEAST_GAMMA and (weight := gamma ** (length / 2)) < _FORGOTTEN:
        texts[f"The discount γ = {gamma:g} looks {1 / (1 - gamma):.2g} steps ahead; an episode takes {length:.0f}"] = (
            float(np.log2((1 - gamma) / (1 - _LEAST_GAMMA))),
            f"A reward half an episode ahead counts {weight:.1g} of one now. {zoo} {_LEAST_GAMMA} or more.",
            "Raise `gamma`, to 0.99 where a reward comes late.",
        )
    title = max(texts, key=lambda each: texts[each][0])
    statistic, reason, advice = texts[title]
    return Sight(max(0.0, statistic), "setting", title, reason, advice)
