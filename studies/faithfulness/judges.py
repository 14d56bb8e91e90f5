"""Does a better judge of records make filtering pay? IIF's records chosen by judges of growing size.

Run: `python -m studies.faithfulness.judges results/faithfulness [--only lunarlander-adam/seed_0] [--workers 2]`. The
recorded rounds of `studies.faithfulness.run`'s runs on LunarLander are trained on what IIF keeps, by scores for

- "own": the rollout's own surrogate of the return, as IIF uses;
- "2000 fresh" ... "50000 fresh": the same surrogate of so many steps that the policy takes anew;
- "fitted values": the rollout's, with advantages from values that a network fits to the returns of 50,000 fresh steps;
- "all actions": the mean over the rollout's states of sum pi(a|s) A(s, a), A fitted to 50,000 fresh steps.

Another 50,000 fresh steps tell what each gains compared with training on everything, scaled to the same divergence. The
last two show what better advantages could do: fitting them to the rollout alone could not do more. A finished round is
not done again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import typer
from torch import Tensor, nn

from studies.advantages import accumulate_errors
from studies.faithfulness.gains import measure_gains
from studies.faithfulness.gradients import large_rollout, monte_carlo
from studies.faithfulness.run import RUNS, Job, Only, Out, Runs, Workers, at_once
from studies.faithfulness.selections import STEPS, Elsewhere, study_rounds
from whence import IIF, Return, attribute
from whence.advantages import continues
from whence.experiments import load_recording
from whence.experiments.rl.rebuilding import read_run_config
from whence.guards import preserve_rng_state
from whence.records import RecordBatch
from whence.runs import RunDirectory
from whence.sb3 import model_objective

SIZES = (2_000, 4_000, 8_000, 16_000, 32_000, 50_000)


def main(out: Out, runs: Runs = RUNS, only: Only = "lunarlander", workers: Workers = 2) -> None:
    """Run what is not there yet."""
    at_once(study_run, out, runs, only, workers)


def study_run(job: Job, out: Path, runs: Path) -> float:
    """Train a run where that is not done, and compare judges in its rounds; return the seconds it took."""
    return study_rounds(job, out, runs, "judge", compare_judges)


def compare_judges(run: RunDirectory, number: int, steps: int = STEPS) -> pl.DataFrame:
    """Return what each judge's selection gains on fresh steps; see `measure_gains`."""
    config = read_run_config(run)
    model, recording = load_recording(run, number)
    large = large_rollout(config, model, steps=steps, seed=number)
    is_judge = torch.arange(len(large)) < len(large) // 2  # environments come one after the other
    judging, fresh = large.take(is_judge), large.take(~is_judge)
    kinds = {"gae": fresh.advantages, "monte-carlo": monte_carlo(large)[~is_judge].to(fresh.advantages)}
    records = recording.records
    targets: dict[str, Any] = {"own": Return()}
    targets |= {f"{size} fresh": Elsewhere([judging.take(slice(0, size))]) for size in SIZES if size <= len(judging)}
    targets["fitted values"] = Elsewhere([fit_advantages(records, judging, seed=number)])
    targets["all actions"] = fit_all_actions(records, judging, int(model.action_space.n), seed=number)
    masks = {
        name: IIF(config.drop)
        .select(records, attribute(model.policy, records, target=target, objective=model_objective(model)))
        .keep
        for name, target in targets.items()
    }
    return measure_gains(
        model.policy,
        recording,
        masks,
        fresh,
        advantages={name: values / values.std() for name, values in kinds.items()},
        seed=number,
    )


def fit_advantages(records: RecordBatch, judging: RecordBatch, *, seed: int) -> RecordBatch:
    """Return records with advantages by GAE from values that are fitted to other records' returns."""
    network = fit_network(_states(judging), (monte_carlo(judging) + judging.values.double()).float(), seed=seed)
    values = network(_states(records)).double().numpy()
    starts, env_index = records.episode_starts.bool().numpy(), records.env_index.numpy()
    continued = continues(starts, env_index)
    assert records.gamma is not None
    assert records.gae_lambda is not None
    rewards = records.rewards.double().numpy()
    following = np.where(continued, np.append(values[1:], 0.0), 0.0)
    # An episode that the rollout cuts off goes on: its last return holds the value of the state that follows.
    cut = np.append(env_index[1:] != env_index[:-1], True)
    last = (records.advantages + records.values).double().numpy()
    errors = np.where(cut, last, rewards + records.gamma * following) - values
    advantages = accumulate_errors(errors, continued, records.gamma * records.gae_lambda)
    return records.with_columns({"advantages": torch.from_numpy(advantages).to(records.advantages)})


@dataclass(frozen=True, eq=False)
class AllActions:
    """The surrogate mean over states of sum_a pi(a|s) A(s, a)."""

    states: RecordBatch
    advantages: Tensor

    def parts(self) -> Iterator[Any]:
        """Yield the target of one action after the other."""
        for action in range(self.advantages.shape[1]):
            yield self._of(action)

    def _of(self, action: int) -> Any:
        taken = self.states.with_columns({"actions": torch.full_like(self.states.actions, action)})

        def target(view: Any, params: Any, _: RecordBatch) -> Tensor:
            probabilities = view(params, view.prepare(taken)).log_prob.exp()
            return (probabilities * self.advantages[:, action]).mean()

        return target

    def __call__(self, view: Any, params: Any, records: RecordBatch) -> Tensor:
        """Return the target, a scalar."""
        return torch.stack([part(view, params, records) for part in self.parts()]).sum()


def fit_all_actions(records: RecordBatch, judging: RecordBatch, n_actions: int, *, seed: int) -> AllActions:
    """Return the surrogate of the records' states by advantages of all actions, fitted to other records' returns."""

    def pair(states: Tensor, actions: Tensor) -> Tensor:
        return torch.cat([states, nn.functional.one_hot(actions.long(), n_actions)], dim=1).float()

    network = fit_network(pair(_states(judging), judging.actions), monte_carlo(judging).float(), seed=seed)
    states = _states(records)
    columns = [network(pair(states, torch.full((len(records),), action))) for action in range(n_actions)]
    return AllActions(records, torch.stack(columns, dim=1))


def fit_network(inputs: Tensor, targets: Tensor, *, seed: int, epochs: int = 30) -> Any:
    """Return a function that predicts targets, (n,), from inputs, (n, k): a network of two layers, by Adam."""
    with preserve_rng_state():
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(inputs.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        mean, deviation = targets.mean(), targets.std() + 1e-8
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(inputs)).split(512):
                loss = (network(inputs[batch])[:, 0] - (targets[batch] - mean) / deviation).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def predict(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return network(inputs)[:, 0] * deviation + mean  # type: ignore[no-any-return]

    return predict


def _states(records: RecordBatch) -> Tensor:
    assert isinstance(records.observations, Tensor)
    return records.observations.float()


if __name__ == "__main__":
    typer.run(main)
