"""The best that a sum of scores could predict: linear predictors fitted to 4,000 trainings of one round.

Run: `python -m studies.faithfulness.datamodels results/faithfulness --only lunarlander-adam [--trainings 4000]`, after
`studies.faithfulness.run` has trained the runs. The middle round of seed 0 is trained on 4,000 random halves, along its
recorded minibatches, so that nothing but the half is random. A ridge regression on growing numbers of them is compared
with trainings that it did not see, alone and beginning from the smoothed score, which is compared with the same
trainings. Every score is compared with all of them. The LDS of the best possible sum of scores is estimated as well.

Trainings are kept beside the runs, a hundred at a time: the command goes on where it was interrupted.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import track
from safetensors.numpy import load_file, save_file

from studies.faithfulness.datamodel import additive_ceiling, fit_datamodel
from studies.faithfulness.run import RUNS, SETUPS, Job, Out, Runs, all_scores
from studies.stored import write_datamodel
from whence import Return, experiments
from whence.counterfactual import compute_lds, draw_subsets, retrain
from whence.counterfactual.outcomes import measure_outcomes
from whence.guards import write_atomically
from whence.runs import RunDirectory

ENVIRONMENTS = ("lunarlander", "minigrid")
AT_ONCE = 100
SIZES = (250, 500, 1000, 2000, 4000)
DRAWS = (64, 512)
"""Trainings that other smoothed scores average: whether more of them help."""


def main(
    out: Out,
    runs: Runs = RUNS,
    only: Annotated[str, typer.Option(help="Environment and optimiser: lunarlander-adam, ...")] = "",
    trainings: Annotated[int, typer.Option(help="How many, in hundreds.", min=SIZES[0])] = 4000,
) -> None:
    """Train, fit and write a line of `datamodels.parquet` for each environment and optimiser."""
    if trainings % AT_ONCE:
        raise typer.BadParameter(f"--trainings is {trainings}; it has to be a multiple of {AT_ONCE}.")
    torch.set_num_threads(1)
    jobs = [Job(env, optimizer, 0) for env, optimizer in SETUPS if env in ENVIRONMENTS]
    for job in jobs:
        name = f"{job.env}-{job.optimizer}"
        if name.startswith(only):
            number = job.setup.studied[1]
            model, recording = experiments.load_recording(RunDirectory.open(runs / job.name), number)
            kept, outcomes = trained(model, recording, runs / job.name / "datamodel", trainings)
            content = {"env": job.env, "optimizer": job.optimizer, "seed": 0, "round": number}
            scores = all_scores(model.policy, recording, DRAWS, target=Return())
            content |= {"trainings": trainings, **fitted(scores, kept, outcomes)}
            write_datamodel(out, content)


def trained(model: Any, recording: Any, folder: Path, trainings: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the subsets and what training on each came to; what is in the folder is not trained again."""
    parts = []
    for number in track(range(trainings // AT_ONCE), str(folder.parent)):
        # By what was collected: a run that was started over is another.
        file = folder / f"{recording.records.fingerprint[:12]}_{number:03d}.safetensors"
        if not file.exists():
            kept = draw_subsets(len(recording.records), 0.5, AT_ONCE, torch.Generator().manual_seed(number))
            params = retrain(model.policy, recording, kept)
            outcomes = measure_outcomes(model.policy, recording, params, Return(), None)
            with write_atomically(file) as temporary:
                save_file({"kept": kept.numpy(), **outcomes}, temporary)
        parts.append(load_file(file))
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return torch.from_numpy(whole.pop("kept")), whole


def fitted(scores: dict[str, Any], kept: torch.Tensor, outcomes: dict[str, Any]) -> dict[str, Any]:
    """Return how well scores, and linear predictors fitted to some of the trainings, predict the outcomes."""
    rows: dict[str, Any] = {"scores": [], "datamodels": [], "ceilings": []}
    for outcome, values in outcomes.items():
        rows["ceilings"].append({"outcome": outcome, **additive_ceiling(kept, values)})
        for name, score in scores.items():
            lds = compute_lds(kept.double().numpy() @ score, values)
            rows["scores"].append({"outcome": outcome, "score": name, **lds})
        for size in (size for size in SIZES if size <= len(kept)):
            for prior in (None, "smoothed"):
                score = None if prior is None else scores[prior]
                fit = fit_datamodel(kept[:size], values[:size], prior=score)
                penalty = fit.penalty if np.isfinite(fit.penalty) else None
                alone = (
                    None if score is None else compute_lds(kept[:size].double().numpy() @ score, values[:size])["lds"]
                )
                about = {"outcome": outcome, "trainings": size, "prior": prior, "penalty": penalty, "prior_lds": alone}
                rows["datamodels"].append({**about, "lds": fit.lds, "low": fit.low, "high": fit.high})
    return rows


if __name__ == "__main__":
    typer.run(main)
