"""How long should a step have been? Recorded rounds are trained on half of their episodes, judged by the other half.

Run: `python -m studies.tuning.candidates RUN [--orders 2]` on a run directory with recorded rounds (`whence train
--record-rounds`). Each round is trained on one half of its episodes under each candidate: the settings of the run, or
others for the epochs, the minibatch, GAE's lambda or the share of records that IIF drops. Then the policy moves along
that update by a factor s, and the other half judges it by the pessimistic surrogate mean(min(rho A, clip(rho, 1/2, 2)
A)); A are the advantages less their mean, over their deviation in the whole rollout: as recorded, and as returns less
values, which favour no lambda. The gain is that less the one before the update. Means are over both halves, orders and
rounds; intervals by 5,000 bootstraps of the rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor

from studies.advantages import change_lambda
from studies.markdown import cell, table
from whence import IIF, Return, attribute
from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.crossfitting import assign_folds
from whence.experiments import load_recording
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import find_acting_parameters
from whence.records import RecordBatch
from whence.rounds import RoundRecording
from whence.rounds.replay import open_round
from whence.runs import RunDirectory
from whence.sb3 import model_objective

SCALES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
LOW, HIGH = 0.5, 2.0
"""The ratios beyond which the judge no longer credits a gain."""

REPEATS = 100_000


@dataclass(frozen=True)
class Candidate:
    """Settings to train a round with; None: as recorded."""

    name: str
    n_epochs: int | None = None
    batch_size: int | None = None
    gae_lambda: float | None = None
    drop: float | None = None


AS_RECORDED = Candidate("as recorded")


def list_candidates(recording: RoundRecording) -> list[Candidate]:
    """Return the settings to try: those recorded, and one of them changed at a time."""
    epochs, batch_size = recording.update.n_epochs, read_batch_size(recording)
    return [
        AS_RECORDED,
        *(Candidate(f"{n} epochs", n_epochs=n) for n in (max(1, epochs // 2), 2 * epochs)),
        *(Candidate(f"minibatches of {size}", batch_size=size) for size in (max(2, batch_size // 2), 2 * batch_size)),
        *(Candidate(f"lambda {value:g}", gae_lambda=value) for value in (0.9, 1.0)),
        *(Candidate(f"drop {share:g}", drop=share) for share in (0.125, 0.5)),
    ]


def train_halves(
    policy: Any, recording: RoundRecording, candidate: Candidate, objective: Any, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Train a round on each half of its episodes.

    Returns:
        The parameters, each (2, ...), and the half of each record, (n,).
    """
    records = recording.records
    half = assign_folds(records, 2)
    masks = torch.stack([half == 0, half == 1])
    if candidate.drop is not None:
        for mask in masks.unbind():
            part = records.take(mask.nonzero()[:, 0])
            scores = attribute(policy, part, target=Return(), objective=objective)
            mask[mask.clone()] = IIF(candidate.drop).select(part, scores).keep
    if candidate.gae_lambda is not None:
        records = change_lambda(records, candidate.gae_lambda)
    update = replace(
        recording.update,
        n_epochs=candidate.n_epochs or recording.update.n_epochs,
        batch_size=candidate.batch_size or read_batch_size(recording),
    )
    changed = replace(recording, update=update, records=records)
    orders = reshuffle(masks, read_batch_size(changed), update.n_epochs, generator)
    return retrain(policy, changed, masks, orders=orders), half


def judge(log_ratio: Tensor, advantages: Tensor) -> tuple[float, float, float]:
    """Return the pessimistic surrogate, the plain one, and the divergence.

    Args:
        log_ratio: (k,) of records, from the policy that collected them.
        advantages: (k,) centred and scaled.
    """
    ratio = log_ratio.exp()
    pessimistic = torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages).mean()
    return float(pessimistic), float((ratio * advantages).mean()), float((ratio - 1 - log_ratio).mean())


def measure_round(
    policy: Any,
    recording: RoundRecording,
    candidates: Sequence[Candidate] = (AS_RECORDED,),
    *,
    objective: Any = None,
    scales: Sequence[float] = SCALES,
    orders: int = 1,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return a row for each candidate, scale, half and order.

    `gain` is by the recorded advantages, `gain_by_returns` by returns less values, `plain` by the recorded ones and the
    unclipped judge; `kl` is the divergence. `objective` is needed for candidates that drop records.
    """
    round = open_round(policy, recording)
    records = round.records
    judged = {"gain": _normalise(records.advantages)}
    if records.gae_lambda is not None:
        judged["gain_by_returns"] = _normalise(change_lambda(records, 1.0).advantages)
    start = round.unflatten(round.start.params)
    acting = find_acting_parameters(round.view, records)
    rows = []
    generator = torch.Generator().manual_seed(seed)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        for order in range(orders):
            for candidate in candidates:
                trained, half = train_halves(policy, recording, candidate, objective, generator)
                for trainee in (0, 1):
                    judges = half != trainee
                    for scale in scales:
                        moved = {n: start[n] + scale * (trained[n][trainee] - start[n]) for n in acting}
                        log_ratio = _read_log_ratio(round, {**start, **moved}, records.take(judges))
                        row = {"round": recording.number, "order": order, "half": trainee, "scale": scale}
                        row |= {"candidate": candidate.name, **_measure_gains(log_ratio, judged, judges)}
                        rows.append(row)
    return rows


def _normalise(advantages: Tensor) -> Tensor:
    return (advantages.double() - advantages.double().mean()) / advantages.double().std()


def _measure_gains(log_ratio: Tensor, judged: Mapping[str, Tensor], judges: Tensor) -> dict[str, float]:
    """Return the gains by each kind of advantages, and the divergence."""
    gains = {}
    for name, advantages in judged.items():
        before = judge(torch.zeros(int(judges.sum())), advantages[judges])
        after = judge(log_ratio, advantages[judges])
        gains[name] = after[0] - before[0]
        if name == "gain":
            gains |= {"plain": after[1] - before[1], "kl": after[2]}
    return gains


def _read_log_ratio(round: Any, params: Any, records: RecordBatch) -> Tensor:
    log_probs = round.view(params, round.view.prepare(records)).log_prob.cpu().double()
    return log_probs - records.log_probs.cpu().double()  # type: ignore[no-any-return]


def summarise(rows: Iterable[dict[str, Any]], name: str = "gain") -> pl.DataFrame:
    """Return each candidate's and scale's mean over rounds with its interval, and the mean divergence."""
    by_round = (
        pl.DataFrame(list(rows))
        .group_by("candidate", "scale", "round", maintain_order=True)
        .agg(pl.col(name, "kl").mean())
    )
    lines = []
    for (candidate, scale), part in by_round.group_by("candidate", "scale", maintain_order=True):
        mean = bootstrap_mean(part[name].to_numpy())
        lines.append({"candidate": candidate, "scale": scale, **mean, "kl": part["kl"].mean()})
    return pl.DataFrame(lines)


def bootstrap_mean(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean of some rounds' values and the ends of its 95% interval: "mean", "low", "high"."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(REPEATS, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def recommend_scale(rows: Sequence[dict[str, Any]], candidate: str = AS_RECORDED.name) -> float | None:
    """Return the factor by which steps should have been longer; 1 if none is measurably better; None: cannot tell.

    It cannot be told if no factor gains anything measurably.
    """
    trials = pl.DataFrame(list(rows)).filter(pl.col("candidate") == candidate)
    means = trials.group_by("round", "scale").agg(pl.col("gain").mean()).sort("round", "scale")  # the draws follow it
    by_round = means.pivot("scale", index="round", values="gain")
    gains = {scale: by_round[str(scale)].to_numpy() for scale in trials["scale"].unique().sort()}
    best = max(gains, key=lambda scale: gains[scale].mean())
    if bootstrap_mean(gains[best])["low"] <= 0:
        return None
    if best == 1 or bootstrap_mean(gains[best] - gains[1.0])["low"] <= 0:
        return 1.0
    return float(best)


def measure_run(run: RunDirectory, *, orders: int = 1) -> list[dict[str, Any]]:
    """Return the rows of all recorded rounds of a run, see `measure_round`."""
    rows: list[dict[str, Any]] = []
    for number in run.recorded_rounds():
        model, recording = load_recording(run, number)
        settings = {"objective": model_objective(model), "orders": orders, "seed": number}
        rows += measure_round(model.policy, recording, list_candidates(recording), **settings)
        print(f"round {number} done", flush=True)
    return rows


def main(
    run: Annotated[Path, typer.Argument(help="A run directory with recorded rounds.")],
    orders: Annotated[int, typer.Option(help="Trainings of each half.")] = 1,
) -> None:
    """Print how long the steps of a run's recorded rounds should have been."""
    rows = measure_run(RunDirectory.open(run), orders=orders)
    summary = summarise(rows)
    head = ["candidate", "step times", "gain", "KL"]
    lines = [[r["candidate"], f"{r['scale']:g}", cell(r), f"{r['kl']:.4f}"] for r in summary.to_dicts()]
    print(table([head, *lines]))
    factor = recommend_scale(rows)
    print(
        "Cannot tell: no step gains measurably."
        if factor is None
        else f"Steps should have been {factor:g} times as long."
    )


if __name__ == "__main__":
    typer.run(main)
