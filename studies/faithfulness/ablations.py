"""What each part of the smoothed score is worth, what the clip range has to do with it, and what else was tried.

Run: `python -m studies.faithfulness.ablations results/faithfulness [--only lunarlander-sgd] [--workers 2]`, after
`studies.faithfulness.run`, with its runs (`--runs`) or without them: they are then trained again. LunarLander, whose
rounds the smoothed score was not settled on; the early, the middle and the late round of every run:

- LDS of the target on the very trainings of `studies.faithfulness.run`, of scores that differ from the derivative
  through the round and from the snapshot in one thing at a time; see `variants`.
- Along the recorded minibatches, what the second-order expansion of the round predicts for each half. This is no sum of
  scores, but shows what a sum would gain from the interactions of pairs of records.
- The same halves, trained again without a clip range: LDS of the derivative there, and how many ratios end outside of
  the range that the round had. If the edge is what limits the derivative, it has to predict these.

A finished round is not done again.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from studies.faithfulness.run import RUNS, SHARES, SUBSETS, Job, Only, Out, Runs, Workers, at_once, trained
from studies.stored import read_round, write_round
from whence import Return, attribute_round, experiments
from whence.counterfactual import compute_lds, retrain
from whence.counterfactual.outcomes import measure_outcomes
from whence.counterfactual.retrain import draw_trained_subsets
from whence.errors import NonFinite
from whence.policies import compute_outputs
from whence.rounds import DRAWS, RoundRecording
from whence.rounds.replay import SteppedRound, open_round
from whence.rounds.schedule import snapshot_scores
from whence.rounds.smoothed import WIDTH, Draws, average_derivatives, draw_trainings

ENVIRONMENTS = ("lunarlander",)
UNCLIPPED = 1e9
STEP = 1e-3
"""Of weights, in the second differences that the expansion is made of."""


def main(out: Out, runs: Runs = RUNS, only: Only = "", workers: Workers = 2) -> None:
    """Do what is not there yet."""
    at_once(study_run, out, runs, only, workers)


def study_run(job: Job, out: Path, runs: Path) -> float:
    """Study the rounds of a run; return the seconds it took."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    for number in job.setup.studied if job.env in ENVIRONMENTS else ():
        about = job.describe_round(number)
        if read_round(out, "ablation", about) is None:
            known = read_round(out, "round", about)
            if known is None:
                raise typer.BadParameter(f"{out} holds no study of {job.name}, round {number}: run faithfulness first.")
            model, recording = experiments.load_recording(trained(job, runs), number)
            write_round(out, "ablation", about | ablations(model.policy, recording, known, job.chance(number)))
    return time.perf_counter() - began


def ablations(policy: Any, recording: RoundRecording, known: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the LDS of every variant on trainings that are known, and what the clip range does.

    Args:
        policy: the policy that was trained.
        recording: the recorded round.
        known: the round's results, as `studies.faithfulness.run` wrote them.
        seed: the seed of its subsets.

    Raises:
        RuntimeError: the recording is not of the round that is known.
    """
    round = open_round(policy, recording)
    scores = variants(round, policy, seed)
    rows = []
    for share in SHARES:
        kept = draw_trained_subsets(recording, share, SUBSETS, torch.Generator().manual_seed(seed))
        for truth, outcomes in known["outcomes"][str(share)].items():
            values = np.mean(outcomes["target"], axis=0)
            about = {"share": share, "truth": truth, "orders": len(outcomes["target"])}
            rows += [about | {"score": name, **_lds_of(kept, score, values)} for name, score in scores.items()]
            if share == 0.5 and truth == "recorded":
                expanded = second_order(policy, recording, kept)
                rows.append(about | {"score": "second order", **compute_lds(expanded, values)})
    _check_known(rows, known["lds"])
    return {"ablations": rows, "clipping": clipping(policy, recording, seed)}


def variants(round: SteppedRound, policy: Any, seed: int) -> dict[str, Tensor]:
    """Return the scores that are compared, (n,) each.

    - "snapshot"; "snapshot, less its own": without what a record says of itself through the target.
    - "unrolled": the derivative along the recorded minibatches.
    - "edge": the same across an edge of some width.
    - "orders": the mean derivative over random orders of all records; "orders, edge": across the edge.
    - "halves": over random halves in random orders; "halves, edge" is the smoothed score.
    - "nine tenths, edge": over random nine tenths.
    """
    recording, target = round.recording, Return()
    n, count = len(round.records), len(recording.steps)
    once = Draws(torch.ones(1, n), [positions[None] for positions in recording.steps], list(recording.epochs)[:count])

    def mean_over(trainings: Draws, width: float) -> Tensor:
        interval = max(1, isqrt(len(trainings.steps)))
        by_epoch = average_derivatives(round, target, trainings, interval, len(trainings.weights), width)
        return by_epoch.sum(dim=0)

    def draws(share: float) -> Draws:
        return draw_trainings(round, DRAWS, share, torch.Generator().manual_seed(seed + 1))

    without_values = replace(recording, update=replace(recording.update, vf_coef=0.0))
    plain = snapshot_scores(open_round(policy, without_values), target)
    return {
        "snapshot": plain,
        "snapshot, less its own": plain - own_terms(round),
        "unrolled": attribute_round(policy, recording, target=target, method="unrolled").scores,
        "edge": mean_over(once, WIDTH),
        "orders": mean_over(draws(1.0), 0.0),
        "orders, edge": mean_over(draws(1.0), WIDTH),
        "halves": mean_over(draws(0.5), 0.0),
        "halves, edge": mean_over(draws(0.5), WIDTH),
        "nine tenths, edge": mean_over(draws(0.9), WIDTH),
    }


def own_terms(round: SteppedRound) -> Tensor:
    """Return what each record's own part of the target says of it, (n,), in the units of the snapshot.

    The snapshot of record i is <grad f, grad l_i>; of f = mean_j A_j log pi_j its own part has the gradient
    A_i grad log pi_i / n, and grad l_i is its normalised advantage times grad log pi_i.
    """
    records = round.records
    raw = records.advantages
    normalised = (raw - raw.mean()) / (raw.std() + 1e-8) if round.recording.update.normalize_advantage else raw

    def log_prob(params: Tensor, position: Tensor) -> Tensor:
        minibatch = round.minibatch_at(position[None])
        return compute_outputs(round.view, {"log_prob"}, round.unflatten(params), minibatch.inputs).log_prob[0]

    gradient = torch.func.grad(log_prob)
    squares = torch.cat(
        [
            torch.func.vmap(lambda position: gradient(round.start.params, position).square().sum())(part)
            for part in torch.arange(len(records)).split(256)
        ]
    )
    return raw * normalised * squares / len(records)


def second_order(policy: Any, recording: RoundRecording, kept: Tensor) -> np.ndarray[Any, Any]:
    """Return what the expansion of the target in the weights predicts for each subset, (m,), in float64.

    By central differences towards each subset: the derivative and half the second derivative.
    """
    dropped = (~kept).double()
    towards, away = (
        outcomes_of_target(policy, recording, 1.0 + sign * STEP * dropped, torch.float64) for sign in (-1, 1)
    )
    here = outcomes_of_target(policy, recording, torch.ones_like(dropped[:1]), torch.float64)
    expansion: np.ndarray[Any, Any] = (towards - away) / (2 * STEP) + (towards - 2 * here + away) / (2 * STEP**2)
    return expansion


def outcomes_of_target(
    policy: Any, recording: RoundRecording, weights: Tensor, dtype: torch.dtype | None = None
) -> np.ndarray[Any, Any]:
    """Return the target after each training along the recorded minibatches, (m,)."""
    round = open_round(policy, recording, dtype=dtype)
    params = retrain(policy, recording, weights, dtype=dtype)
    with torch.no_grad():
        by_row = [{name: tensor[number] for name, tensor in params.items()} for number in range(len(weights))]
        return np.array([float(Return()(round.view, one, round.records)) for one in by_row])


def clipping(policy: Any, recording: RoundRecording, seed: int) -> list[dict[str, Any]]:
    """Return, with the clip range and without, how well the derivative predicts recorded halves.

    Each row has the LDS of "unrolled" there, and the share of all records' ratios that are outside of the round's own
    clip range after it ("outside") and after training on a half ("outside, halves", mean of all). Without a clip range
    a round may diverge: then there are none.
    """
    rows = []
    kept = draw_trained_subsets(recording, 0.5, SUBSETS, torch.Generator().manual_seed(seed))
    everything = torch.ones(1, len(recording.records), dtype=torch.bool)
    for clip_range in (recording.update.clip_range, UNCLIPPED):
        variant = replace(recording, update=replace(recording.update, clip_range=clip_range))
        row: dict[str, Any] = {"clipped": clip_range != UNCLIPPED}
        try:
            score = attribute_round(policy, variant, target=Return(), method="unrolled").scores
            halves = retrain(policy, variant, kept)
            row |= _lds_of(kept, score, measure_outcomes(policy, variant, halves, Return(), None)["target"])
            row |= {"outside": outside(policy, recording, retrain(policy, variant, everything))}
            row |= {"outside, halves": outside(policy, recording, halves)}
        except NonFinite as diverged:
            row |= {"diverged": str(diverged)}
        rows.append(row)
    return rows


def outside(policy: Any, recording: RoundRecording, trained_to: Mapping[str, Tensor]) -> float:
    """Return the share of ratios outside of a recording's clip range, mean over trainings."""
    round = open_round(policy, recording)
    shares = []
    with torch.no_grad():
        for number in range(len(next(iter(trained_to.values())))):
            params = {name: tensor[number] for name, tensor in trained_to.items()}
            log_prob = compute_outputs(round.view, {"log_prob"}, params, round.inputs).log_prob
            ratio = (log_prob - round.records.log_probs).exp()
            shares.append(float(((ratio - 1).abs() > recording.update.clip_range).double().mean()))
    return float(np.mean(shares))


def _lds_of(kept: Tensor, score: Tensor, values: np.ndarray[Any, Any]) -> dict[str, Any]:
    return dict(compute_lds(kept.double().numpy() @ score.double().cpu().numpy(), values))


def _check_known(rows: list[dict[str, Any]], known: list[dict[str, Any]]) -> None:
    """Refuse a recording whose snapshot and derivative do not do what they did."""
    places = {(row["share"], row["truth"], row["score"]): row["lds"] for row in known if row["outcome"] == "target"}
    for row in rows:
        if row["score"] in ("snapshot", "unrolled"):
            now, before = row["lds"], places[row["share"], row["truth"], row["score"]]
            if now != before and (now is None or before is None or abs(now - before) > 5e-3):
                raise RuntimeError(
                    f"LDS of {row['score']} is {now} and was {before}: this is not the training run that was studied. "
                    "Other versions of what trained it make another one."
                )


if __name__ == "__main__":
    typer.run(main)
