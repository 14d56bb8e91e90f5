"""The learner's side of any loop, as a run: each round scored, selected from and written before it is trained on."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from whence.core import (
    AGENT_UNITS,
    UNKNOWN,
    InvalidRecords,
    Objective,
    PolicyView,
    RecordBatch,
    Return,
    Target,
    WhenceError,
    as_objective,
    as_view,
    check_records,
    describe_scoring,
    first_line,
    library_versions,
    named_leaves,
    named_tensors,
    to_numpy,
)
from whence.runs import Checkpoint, EpisodeCounter, RunRecorder, find_last_round, time_stage
from whence.scores import FOLDS, attribute, check_folds, estimate_errors, name_round
from whence.selection import (
    Progress,
    RoundResult,
    ScoreAll,
    SelectionRule,
    add_selection,
    check_rule,
    check_selection,
    choose_target,
    score_for,
    summarise_selection,
)

CUSTOM = "custom"
"""The algorithm, in a run's configuration, of a loop whose policy a function of the user's makes."""

SHAPES = "shapes"
"""The note of a run that holds dtype and shape of what a record observes and does, and of the policy's tensors."""


class Run:
    """The run directory of any training loop: call `write_round` between collecting a rollout and optimising on it.

    Writing changes nothing of the policy, its gradients and modes, nor any random generator. If the directory holds a
    run of the same configuration, rounds are added to it. The environments' side is a run of its own: see `record`.

    Args:
        run: the directory to write to.
        rule: which records train: `IIF(drop=0.125)` or another rule. None: all of them; they are scored and written.
            `KeepAll()`: they are written and not scored, which is the cheapest.
        target: what to raise; None: `Return()`.
        objective: what the loop's optimisation raises, one value per record; None: `PPOClip()`.
        folds: folds of episodes that errors of scores are computed over; None: scores have no errors.
        env: the environment's id, by which pages name actions and observations; None: not known.
        policy: the name of a function without arguments, "module:function", that returns a `PolicyView`, into which
            `whence attribute` and `why` load the tensors of a round. None: these commands refuse the run.
        overwrite: delete the run that the directory holds, and start anew.

    Raises:
        WhenceError: an argument is not what it should be.
        RunDirectoryError: the directory holds another run.

    Example:
        ```
        run = whence.Run("runs/mine", whence.IIF(drop=0.25), policy="my_module:make_policy")
        keep = run.write_round(whence.ModuleView(actor, read_actor), records).selection.keep
        ```
    """

    def __init__(
        self,
        run: str | Path,
        rule: SelectionRule | None = None,
        *,
        target: Target | None = None,
        objective: Objective | None = None,
        folds: int | None = FOLDS,
        env: str | None = None,
        policy: str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.rule, self.objective = ScoreAll() if rule is None else rule, as_objective(objective)
        check_rule(self.rule, AGENT_UNITS)
        self.target, self.folds = choose_target(self.rule, target, Return()), check_folds(folds)
        if policy is not None and not (isinstance(policy, str) and all(policy.partition(":"))):
            raise WhenceError(f"policy is {policy!r}; name the function that returns it, as 'module:function'.")
        scoring = describe_scoring(self.rule, self.target, self.objective)
        config = {"algorithm": CUSTOM, "policy": policy, "env": env, "env_kwargs": {}, **scoring}
        versions = library_versions(("whence", "torch", "numpy"))
        self._recorder, self._logged = RunRecorder(run), set[str]()
        start = self._recorder.begin(config, versions=versions, overwrite=overwrite, find=find_last_round)
        self._row: dict[str, Any] = {"round": 0, "timestep": 0}
        self._next_id, self._episodes = 0, EpisodeCounter()
        self._view: PolicyView | None = None
        if start is not None and start.round:
            self._continue_after(start)

    def _continue_after(self, start: Checkpoint) -> None:
        self._recorder.continue_after(start, ["the loop began anew, and with it whatever it trains"])
        self._row = self._recorder.directory.table("metrics").row(-1, named=True)
        table = self._recorder.directory.round("records", start.round)
        self._next_id = table.select(pl.col("record_id").max()).item() + 1
        if "episode_id" in table.columns:
            self._episodes = EpisodeCounter((table.select(pl.col("episode_id").max()).item() or 0) + 1)

    def write_round(
        self,
        policy: object,
        records: RecordBatch,
        *,
        ends: tuple[Any, Any] | None = None,
        infos: Mapping[str, Any] | None = None,
        remaining: float = 1.0,
    ) -> RoundResult:
        """Score a round's records, select from them, and write both with the policy, before any of it trains.

        Ids of records continue those of earlier rounds. So do episodes, if the records have an `env_index`, as those
        of `from_rollout`, and `episode_starts`, or `ends` are passed.

        Args:
            policy: the policy that collected the records, as `attribute` takes it.
            records: n records.
            ends: whether each record ended its episode by termination, and whether by truncation, two arrays in the
                order of the records, (n,) or (steps, environments); None: not known.
            infos: further numbers of each record by name, such as the terms of its reward, in the same shapes. They are
                written, and nothing is scored or selected by them.
            remaining: the share of the training still to come, which a rule's schedule is called with.

        Returns:
            The round's `number`, `records`, `influence` and `selection`; train on the records in `selection.keep`.

        Raises:
            WhenceError: the policy is no view or has other tensors than before, the records are of other shapes or
                not finite, or the rule returns no selection; nothing is written then.
        """
        view = as_view(policy)
        check_records(records)
        self._check_shapes(shapes := _describe_shapes(view, records))
        end = None if ends is None else _read_ends(ends, len(records))
        further = [_read_info(name, column, len(records)) for name, column in (infos or {}).items()]
        number, seconds = self._row["round"] + 1, dict[str, dict[str, float]]()
        records = self._number(records, end)
        influence, score = None, partial[Any](attribute, view)
        with name_round(number), time_stage(seconds, "scoring"):
            if self.rule.needs_influence:
                influence = score_for(self.rule, records, score, target=self.target, objective=self.objective)
            with time_stage(seconds, "errors"):
                scored = influence, records, self.target, self.folds, self._logged
                with_errors = estimate_errors(view, *scored, objective=self.objective)
            selection = self.rule.select(records, influence, Progress(number, remaining))
        check_selection(selection, records, f"{type(self.rule).__name__}.select()")
        table = add_selection(records.to_polars(observations=True), selection, with_errors)
        if number == 1:
            self._recorder.directory.note(**{SHAPES: shapes})
        columns = [*([] if end is None else [end]), *further]
        tensors: Any = {"policies": named_tensors(view)}
        self._recorder.write_round(number, table.with_columns(columns), tensors=tensors)
        timestep, row = self._row["timestep"] + len(records), summarise_selection(selection, with_errors)
        self._row = {"round": number, "timestep": timestep, **row, "episode_return": self._episodes.mean_return}
        self._recorder.write_rows(self._row, seconds)
        self._next_id, self._view = int(records.ids.max()) + 1, view
        return RoundResult(number, records, with_errors, selection)

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to the last round's row of metrics, such as {"train/approx_kl": 0.01} after its optimisation."""
        if not self._row["round"]:
            raise WhenceError("write_metrics() adds to the row of a round, and none was written: call write_round().")
        if counted := metrics.keys() & {"round", "timestep"}:
            raise WhenceError(f"metrics has {sorted(counted)[0]!r}, which whence counts itself: leave it out.")
        self._row |= {name: float(number) for name, number in metrics.items()}
        self._recorder.directory.append("metrics", self._row)

    def close(self) -> None:
        """Write the trained policy, which follows the last round, and let others write the directory."""
        if self._view is not None:
            self._recorder.directory.write_policy(self._row["round"] + 1, named_tensors(self._view))
        self._recorder.end()

    def _check_shapes(self, shapes: dict[str, Any]) -> None:
        """Refuse records or a policy of other dtypes and shapes than the run's."""
        stored = self._recorder.directory.notes[SHAPES] if self._row["round"] else shapes
        for name in sorted(shapes.keys() | stored.keys()):
            if shapes.get(name) != stored.get(name):
                raise InvalidRecords(
                    f"`{name}` has dtype and shape {shapes.get(name)}, and {stored.get(name)} in the rounds of "
                    f"{self._recorder.path} so far: a run has one policy and one kind of records. Write to another run."
                )

    def _number(self, records: RecordBatch, end: pl.Series | None) -> RecordBatch:
        """Return the records with ids and episodes that continue those of earlier rounds."""
        columns, envs, starts = dict[str, Any](), records.env_index, records.episode_starts
        if int(records.ids.min()) < self._next_id:
            columns["record_ids"] = records.ids + self._next_id
            if (ids := records.episode_ids) is not None:
                columns["episode_ids"] = torch.where(ids == UNKNOWN, ids, ids + self._next_id)
        is_known = envs is not None and not (envs == UNKNOWN).any()
        if envs is not None and is_known and (starts is not None or end is not None):
            order = np.lexsort((records.ids.cpu().numpy(), envs.cpu().numpy()))
            rewards = None if records.rewards is None else records.rewards.cpu().numpy()[order]
            ended = None if end is None else end.is_not_null().to_numpy()[order]
            begins = None if starts is None else starts.cpu().numpy()[order]
            numbers = self._episodes.number(envs.cpu().numpy()[order], begins, ended, rewards)
            for name, column in zip(("episode_ids", "steps"), numbers, strict=True):
                columns[name] = torch.from_numpy(column[order.argsort()]).to(envs.device)
            columns["episode_starts"] = columns["steps"] == 0
        return records.with_columns(columns)


def _describe_shapes(view: PolicyView, records: RecordBatch) -> dict[str, Any]:
    """Return the dtype and the shape of each part of a record, and of each tensor of the policy."""
    leaves = [*named_leaves(records.observations, "observations"), ("actions", records.actions)]
    shapes = {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in leaves}
    shapes |= {f"policy.{name}": (each.dtype, each.shape) for name, each in named_tensors(view).items()}
    return {name: [str(dtype).removeprefix("torch."), *shape] for name, (dtype, shape) in shapes.items()}


def _read_ends(ends: tuple[Any, Any], count: int) -> pl.Series:
    """Return the column `end`: "terminated" or "truncated" at an episode's last record, else null."""
    terminated, truncated = (torch.as_tensor(each).cpu().bool().flatten().numpy() for each in ends)
    if {len(terminated), len(truncated)} != {count}:
        raise InvalidRecords(
            f"ends holds {len(terminated)} and {len(truncated)} entries for {count} records; pass (terminated, "
            "truncated), each with one entry per record, in the order of the records."
        )
    words = pl.Series("end", ["terminated", "truncated", None])
    return words.gather(np.where(terminated, 0, np.where(truncated, 1, 2)))


def _read_info(name: str, column: Any, count: int) -> pl.Series:
    """Return the column `info.NAME` of a number of each record."""
    try:
        numbers = to_numpy(torch.as_tensor(column).detach()).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InvalidRecords(f"infos[{name!r}] holds what are no numbers ({first_line(failure)}).") from None
    if len(numbers) != count:
        raise InvalidRecords(
            f"infos[{name!r}] holds {len(numbers)} numbers for {count} records; pass one per record, in the order of "
            "the records."
        )
    return pl.Series(f"info.{name}", numbers)
