"""Coverage of the errors of groups: fresh rollouts of a fixed policy, and how often a group's interval holds the mean.

`python -m studies.faithfulness.groups results/faithfulness` writes `groups.json` and its table, `groups.md`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from studies.shared import Out, report, round_numbers, table, write_page
from whence import RecordBatch, Return, attribute
from whence.core import label_units, write_json
from whence.folds import FOLDS
from whence.groups import group_errors
from whence.influence import SIGNIFICANT
from whence.moments import read_axes
from whence.sb3 import collect, model_objective

SETTINGS: dict[str, dict[str, Any]] = {
    "frozenlake": {"env": "FrozenLake-v1", "n_envs": 1, "rounds": (2, 10, 30)},
    "lunarlander": {"env": "LunarLander-v3", "n_envs": 8, "rounds": (5, 20)},
}
"""Trainings with SB3's defaults; rounds of 2,048 records."""

ROLLOUTS = 40


def measure_setting(env: str, n_envs: int, rounds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a row for each round and kind of group; see `cover_groups`."""
    model = PPO("MlpPolicy", make_vec_env(env, n_envs, seed=0), n_steps=2048 // n_envs, seed=0, device="cpu")
    rows: list[dict[str, Any]] = []
    trained = 0
    for number in rounds:
        model.learn((number - trained) * 2048, reset_num_timesteps=trained == 0)
        trained = number
        rollout_scores = [score_rollout(model, seed) for seed in range(ROLLOUTS)]
        noise = [share for _, share in rollout_scores]
        about = {"env": env, "round": number, "noise": np.mean(noise), "noise_sd": np.std(noise)}
        about |= {"noise_q95": np.quantile(noise, 0.95)}
        rows += [about | row for row in cover_groups([scored for scored, _ in rollout_scores])]
        report(rows[-1])
    return rows


def score_rollout(model: PPO, seed: int) -> tuple[pl.DataFrame, float]:
    """Return a fresh rollout's records with scores, and the share beyond two errors under noise.

    The noise: the target's advantages have a random sign an episode, so that it has no gradient in the mean.
    """
    records = collect(model)
    influence = attribute(model.policy, records, target=Return(), objective=model_objective(model), folds=FOLDS)
    episode = label_units(records, "episode")
    signs = torch.randint(2, (int(episode.max()) + 1,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    flipped = RecordBatch(**{**records.columns, "advantages": records.advantages * signs[episode]})
    noise = attribute(model.policy, flipped, target=Return(), objective=model_objective(model), folds=FOLDS)
    scored = records.to_polars(observations=True).join(influence.to_polars(), on="record_id", maintain_order="left")
    return scored, float(noise.is_significant().double().mean())


def cover_groups(rollouts: list[pl.DataFrame]) -> Iterator[dict[str, Any]]:
    """Yield for each kind of group how often mean ± two errors holds the mean of all rollouts.

    `covered`: by the error of `group_errors`; `independent`: by that of independent records; `wrong_sign`: the interval
    lies wholly on the other side of 0 than the mean of all rollouts; `known`: the share of groups that have an error;
    `ratio`: the error of independent records as a share of the spread over rollouts, in the median.
    """
    for by, labels in _label_groups(pl.concat(rollouts)).items():
        parts = np.split(labels, np.cumsum([len(each) for each in rollouts])[:-1])
        summaries = [_summarise(each, part) for each, part in zip(rollouts, parts, strict=True)]
        groups = pl.concat(summaries).with_columns(
            truth=pl.col("mean").mean().over("group"),
            spread=pl.col("mean").std().over("group"),
            rollouts=pl.len().over("group"),
        )
        groups = groups.filter(pl.col("rollouts") >= len(rollouts) // 2, pl.col("records") > 1)
        judged = groups.filter(pl.col("error").is_not_null())
        missed, margin = (judged["mean"] - judged["truth"]).abs(), SIGNIFICANT * judged["error"]
        is_wrong = (judged["mean"].abs() > margin) & (judged["mean"].sign() != judged["truth"].sign())
        yield {
            "by": by,
            "groups": groups["group"].n_unique(),
            "covered": (missed <= margin).mean(),
            "independent": (missed <= SIGNIFICANT * judged["independent"]).mean(),
            "wrong_sign": is_wrong.mean(),
            "known": len(judged) / len(groups),
            "ratio": (judged["independent"] / judged["spread"]).median(),
        }


def _summarise(scored: pl.DataFrame, labels: NDArray[Any]) -> pl.DataFrame:
    distinct, places = np.unique(labels, return_inverse=True)
    groups = pl.Series("group", labels)
    errors = pl.DataFrame({"group": distinct, "error": group_errors(scored, places)}).fill_nan(None)
    score = pl.col("score").cast(pl.Float64)
    means = scored.with_columns(groups).group_by("group")
    summary = means.agg(records=pl.len(), mean=score.mean(), independent=score.std() / pl.len().sqrt())
    return summary.join(errors, on="group")


def _label_groups(pooled: pl.DataFrame) -> Mapping[str, NDArray[Any]]:
    """Return the group of each record of all rollouts, cut at the same places in all of them."""
    axes = [*read_axes(pooled).values()]
    is_state = len(axes) == 1
    region = axes[0].astype(int) if is_state else 3 * _cut(axes[0]) + _cut(axes[1])
    rewards = pooled["reward"].to_numpy()
    reward = np.searchsorted(np.unique(rewards), rewards) if pooled["reward"].n_unique() <= 8 else _cut(rewards)
    action, time = pooled["action"].to_numpy().astype(int), _cut(pooled["step"].fill_null(-1).to_numpy())
    return {
        "action": action,
        "region": region,
        "reward": reward,
        "time": time,
        "action × region": 100 * action + region,
    }


def _cut(values: NDArray[Any]) -> NDArray[np.int64]:
    return np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values, side="right")


def main(
    out: Out, only: Annotated[str, typer.Option(help="Environments, separated by commas.")] = ",".join(SETTINGS)
) -> None:
    """Measure environments anew, and write groups.json and groups.md."""
    file = out / "groups.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in only.split(","):
        content[name] = round_numbers(measure_setting(**SETTINGS[name]))
        write_json(file, content)
    lines = [["environment", "round", "groups", "covered", "as independent", "wrong sign", "with an error"]]
    for row in (row for rows in content.values() for row in rows):
        shares = [f"{row[name]:.0%}" for name in ("covered", "independent", "wrong_sign", "known")]
        lines.append([row["env"], str(row["round"]), f"{row['groups']} by {row['by']}", *shares])
    write_page(out / "groups.md", table(lines))


if __name__ == "__main__":
    typer.run(main)
