"""The suite's whole rounds, with scoring or the recorder and without, in turns; and scores with errors."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from stable_baselines3.common.callbacks import BaseCallback

from studies.benchmarks.cells import Cell, Result, Setting
from studies.benchmarks.policies import make_model
from studies.benchmarks.timing import spread, take_turns
from whence import IIF, Return, RunDirectory, attribute
from whence.sb3 import InfluenceCallback, collect, model_objective
from whence.scores.folds import FOLDS

WORLDS = {"lunar-lander": "mlp", "minigrid": "minigrid"}
"""Worlds, and the suite's policy of each."""

RECORDED = {"lunar-lander": "mlp", "cartpole": "cartpole"}
"""The same for the recorder; CartPole's rounds have 512 records."""

DROP = 0.125
"""The share of records that score below 0 that IIF drops."""

LEAST = 3
"""Rounds of each kind that are counted, at least; the first of each is not."""


def list_cells() -> Iterator[Cell]:
    """Yield the cells of each world."""
    for world in RECORDED:
        yield Cell(f"errors/{world}", "errors", partial(measure_errors, world))
    for world in WORLDS:
        yield Cell(f"rounds/{world}", "rounds", partial(measure_world, world))
    for world in RECORDED:
        yield Cell(f"rounds/recorded-{world}", "rounds", partial(measure_recorder, world))


ROUNDS = 3
"""Rounds of one `learn()`, of which the second is measured: the others begin and end it."""


class Clock(BaseCallback):
    """Notes when rollouts start and end, and how long the scoring before each took."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.scoring: list[float] = []

    def _on_rollout_start(self) -> None:
        self.starts.append(time.perf_counter())
        self.scoring.append(float(self.logger.name_to_value.get("influence/seconds", 0.0)))

    def _on_rollout_end(self) -> None:
        self.ends.append(time.perf_counter())

    def _on_step(self) -> bool:
        return True


def measure_world(world: str, setting: Setting) -> Result:
    """Return the seconds of rounds of SB3's PPO and of PPO with IIF by stage; rounds of the two take turns."""
    return _compare(WORLDS[world], "PPO + IIF", InfluenceCallback(IIF(drop=DROP)), None, setting)


def measure_recorder(world: str, setting: Setting) -> Result:
    """Return the same of PPO and of PPO with the recorder, which scores with errors and writes each round."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        return _compare(RECORDED[world], "PPO, recorded", InfluenceCallback(run=run), run, setting)


def measure_errors(world: str, setting: Setting) -> Result:
    """Return the seconds of scoring a rollout with errors, as the recorder does, and how often as long that is."""
    model = make_model(RECORDED[world], setting.device)
    records, objective = collect(model), model_objective(model)
    score = partial(attribute, model.policy, records, target=Return(), objective=objective)
    turns = take_turns([partial(score, folds=FOLDS), score], repeats=setting.repeats, device=setting.device)
    return {
        "records": len(records),
        "seconds": spread([turn[0] for turn in turns]),
        "without": spread([turn[1] for turn in turns]),
        "ratio": spread([turn[0] / turn[1] for turn in turns]),
    }


def _compare(policy: str, title: str, influence: InfluenceCallback, run: Path | None, setting: Setting) -> Result:
    """Measure rounds with a callback; of a `run`, all but collection and optimisation counts as scoring."""
    plain, scored = (make_model(policy, setting.device) for _ in range(2))
    rounds: dict[str, list[dict[str, float]]] = {"PPO": [], title: []}
    for _ in range(max(LEAST, setting.repeats) + 1):
        for name, model in (("PPO", plain), (title, scored)):
            clock = Clock()
            callbacks = [clock] if model is plain else [clock, influence]
            model.learn(ROUNDS * model.n_steps, callback=callbacks, reset_num_timesteps=False)
            start, end, over, scoring = clock.starts[1], clock.ends[1], clock.starts[2], clock.scoring[2]
            if run is not None and model is scored:
                scoring = over - end - RunDirectory.open(run).table("timings")["optimisation_wall"][-2]
            stages = {"collection": end - start, "optimisation": over - end - scoring, "scoring": scoring}
            rounds[name].append({**stages, "round": over - start})
    counted = {name: each[1:] for name, each in rounds.items()}
    pairs = list(zip(*counted.values(), strict=True))
    return {
        "records": plain.n_steps,
        "stages": {
            name: {stage: spread([one[stage] for one in each]) for stage in each[0]} for name, each in counted.items()
        },
        "seconds": spread([one["round"] for _, one in pairs]),
        "ratio": spread([one["round"] / other["round"] for other, one in pairs]),
        "share": spread([one["scoring"] / one["round"] for _, one in pairs]),
    }
