"""What selections gain beyond the records they were made of: by the size of the update, and by its direction.

Run: `python -m studies.faithfulness.selections results/faithfulness [--only lunarlander-adam/seed_0] [--workers 2]`.
The recorded rounds of `studies.faithfulness.run`'s runs are trained on selections of their records, and judged by
50,000 steps that the round's policy takes anew: the rise of `mean(rho A)` there, A by GAE and as returns less values,
in their standard deviations. Each suspect of why filtering may fail is a selection that differs from "iif" in one
thing; how many records that drops differs with it, since p is a share of those that score below 0.

- "iif": the share `drop` of the records that score below 0, lowest first, by the snapshot score; "below 0": all of
  them; "below mean": the share `drop` of those below the mean score.
- "cross-fitted": halves of the episodes judge each other, so that no record has a voice in its own score;
  "cross-fitted, 8 folds": seven eighths judge the last.
- "earlier rollouts": those of up to four rounds before judge, reweighted to the policy as it is.
- "fresh target": 50,000 further steps judge, so that nothing of the rollout has one. By GAE it shares the errors of the
  values with what it is judged by; by returns it does not.
- "preconditioned": the target's gradient goes through Adam's scale at the beginning of the round, and is 0 where Adam
  has seen no gradient yet.
- "all, normalised once", "iif, normalised once": advantages are not centred anew in each minibatch.
- "random": as many as iif, at random among all; "random below 0": among those that score below 0.

A finished round is not done again. Training runs are shared with `studies.faithfulness.run`, in `--runs`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
import typer
from torch import Tensor

from studies.faithfulness.gains import measure_gains
from studies.faithfulness.gradients import large_rollout, monte_carlo
from studies.faithfulness.run import RUNS, Job, Only, Out, Runs, Workers, at_once, trained
from studies.stored import read_round, write_round
from whence import IIF, BelowMean, NegativeRandom, PPOClip, RandomDrop, Return, attribute, attribute_crossfit
from whence.core import RecordBatch
from whence.experiments import RunConfig, load_recording, load_round
from whence.rounds import RoundRecording, open_round
from whence.rounds.optimizers import preconditioner
from whence.rounds.replay import target_gradient
from whence.runs import RunDirectory
from whence.sb3 import model_objective

STEPS = 100_000
"""Of which one half judges, and the other is the fresh target."""

EARLIER = 4
"""Rounds before that judge."""

ONCE = ", normalised once"


def main(out: Out, runs: Runs = RUNS, only: Only = "", workers: Workers = 2) -> None:
    """Run what is not there yet."""
    at_once(study_run, out, runs, only, workers)


def study_run(job: Job, out: Path, runs: Path) -> float:
    """Train a run where that is not done, and judge selections in its rounds; return the seconds it took."""
    return study_rounds(job, out, runs, "selection", judged)


def study_rounds(
    job: Job, out: Path, runs: Path, kind: str, measure: Callable[[RunDirectory, int], pl.DataFrame]
) -> float:
    """Train a run where that is not done, and write what `measure` says of its recorded rounds; return the seconds."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    run = trained(job, runs)
    for number in job.setup.recorded:
        about = job.describe_round(number)
        if read_round(out, kind, about) is None:
            write_round(out, kind, about | {f"{kind}s": measure(run, number).to_dicts()})
    return time.perf_counter() - began


def judged(run: RunDirectory, number: int) -> pl.DataFrame:
    """Return what selections of a round gain on fresh steps."""
    config = RunConfig.from_json(run.experiment)
    model, recording = load_recording(run, number)
    large = large_rollout(config, model, steps=STEPS, seed=number)
    half = torch.arange(len(large)) < len(large) // 2  # environments come one after the other
    fresh = large.take(~half)
    kinds = {"gae": fresh.advantages, "monte-carlo": monte_carlo(large)[~half].to(fresh.advantages)}
    kinds = {name: values / values.std() for name, values in kinds.items()}  # so that rounds can be compared
    before = [load_round(run, earlier)[1] for earlier in range(max(1, number - EARLIER), number)]
    masks = selections(config.drop, model, recording, {"fresh target": [large.take(half)], "earlier rollouts": before})
    gains = measure_gains(model.policy, recording, masks, fresh, advantages=kinds, seed=number)
    once = measure_gains(
        model.policy, normalised_once(recording), {"iif": masks["iif"]}, fresh, advantages=kinds, seed=number
    )
    return pl.concat([gains, once.with_columns(selection=pl.col("selection") + ONCE)])


def selections(
    drop: float, model: Any, recording: RoundRecording, elsewhere: Mapping[str, Sequence[RecordBatch]]
) -> Mapping[str, Tensor]:
    """Return which records each selection keeps; `elsewhere` are the records that judge, by the selection's name."""
    records, policy, seed = recording.records, model.policy, recording.number
    scoring: dict[str, Any] = {"objective": model_objective(model)}
    targets = {"iif": Return(), **{name: Elsewhere(rollouts) for name, rollouts in elsewhere.items()}}
    if recording.optimizer.name == "Adam":
        targets["preconditioned"] = Along(_preconditioned(policy, recording))
    scores = {name: attribute(policy, records, target=target, **scoring) for name, target in targets.items()}
    for name, folds in (("cross-fitted", 2), ("cross-fitted, 8 folds", 8)):
        scores[name] = attribute_crossfit(policy, records, target=Return(), folds=folds, **scoring)
    rules = {
        "below 0": IIF(1.0),
        "below mean": BelowMean(drop),
        "random": RandomDrop(drop, seed),
        "random below 0": NegativeRandom(drop, seed),
    }
    kept = {name: IIF(drop).select(records, influence).keep for name, influence in scores.items()}
    return kept | {name: rule.select(records, scores["iif"]).keep for name, rule in rules.items()}


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """The surrogate `mean(rho A)` of other records than the scored ones, which policies not far from this collected.

    Where this one did, its gradient is that of `Return()`.
    """

    rollouts: Sequence[RecordBatch]

    def parts(self, at_once: int = 10_000) -> Iterable[Any]:
        """Yield the target of some records after the other."""
        for records in self.rollouts:
            for first in range(0, len(records), at_once):
                yield self._of(records.take(slice(first, first + at_once)))

    def _of(self, some: RecordBatch) -> Any:
        count = sum(map(len, self.rollouts))

        def target(view: Any, params: Any, _: RecordBatch) -> Tensor:
            ratio = (view(params, view.prepare(some)).log_prob - some.log_probs).exp()
            return (ratio * some.advantages).sum() / count

        return target

    def __call__(self, view: Any, params: Any, records: RecordBatch) -> Tensor:
        """Return the target, a scalar."""
        return torch.stack([part(view, params, records) for part in self.parts()]).sum()


@dataclass(frozen=True, eq=False)
class Along:
    """How far the parameters lie along a direction."""

    direction: Mapping[str, Tensor]

    def __call__(self, view: Any, params: Any, records: RecordBatch) -> Tensor:
        """Return the target, a scalar."""
        return torch.stack([(tensor * params[name]).sum() for name, tensor in self.direction.items()]).sum()


def _preconditioned(policy: Any, recording: RoundRecording) -> Mapping[str, Tensor]:
    """Return the gradient of `Return()` at the round's beginning as the optimiser would scale it."""
    round = open_round(policy, recording)
    gradient = target_gradient(round, round.start.params, Return())
    state = round.start.state
    scale = preconditioner(recording.optimizer, state)
    return round.unflatten(gradient * torch.where(state["exp_avg_sq"] > 0, scale, 0.0))


def normalised_once(recording: RoundRecording) -> RoundRecording:
    """Return a recording whose advantages are normalised over the rollout, and not again in each minibatch."""
    records = PPOClip(advantage_norm="buffer").prepare(recording.records)
    return replace(recording, records=records, update=replace(recording.update, normalize_advantage=False))


if __name__ == "__main__":
    typer.run(main)
