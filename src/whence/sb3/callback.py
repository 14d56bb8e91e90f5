"""Influence-based selection inside SB3's own training loop, as one callback."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from stable_baselines3.common.callbacks import BaseCallback

from whence.core import (
    AGENT_UNITS,
    Objective,
    RecordBatch,
    Return,
    Target,
    Unsupported,
    WhenceError,
    as_objective,
    call_plugin,
    describe_scoring,
    named_tensors,
    suggest,
)
from whence.engines import check_engine, check_memory
from whence.rounds import RoundRecording
from whence.runs import Checkpoint, RunDirectory, RunRecorder, Stopwatch, time_stage
from whence.sb3.checkpointing import CallbackState, is_other, open_run, read_training, restore_training
from whence.sb3.episodes import ResetTracker, check_factory
from whence.sb3.models import Names, check_model, check_names, read_names
from whence.sb3.policy import warn_of_log_probs
from whence.sb3.recorded_envs import WatchedVecEnv
from whence.sb3.recorded_models import end_round_if_due, record_model, stop_recording, warn_of_no_scores
from whence.sb3.round_result import (
    Choice,
    RoundResult,
    measure_choice,
    read_settings,
    read_train_metrics,
    record_next_rollout,
    write_round,
)
from whence.sb3.rounds import (
    EnvironmentSteps,
    Last,
    Recorder,
    cancel_hook,
    check_callers,
    check_groups,
    check_observation,
    check_recordings,
    check_step,
    claim_learn,
    model_objective,
    read_buffer,
    select_from,
    watch_training,
    wrap_next,
)
from whence.scores import FOLDS, Influence, attribute, attribute_with_errors, check_folds, estimate_errors, name_round
from whence.selection import (
    Progress,
    ScoreAll,
    Selection,
    SelectionRule,
    can_train,
    check_rule,
    check_selection,
    choose_target,
    score_for,
)


class InfluenceCallback(BaseCallback):
    """Score each rollout and let SB3's `train()` see the records that a rule selects (LDA Alg. 1).

    Scoring happens when `train()` begins, on the rollout as other callbacks leave it. It changes nothing of the model,
    its optimiser, buffer or generators. `train()` is SB3's own. Its buffer's `get` yields the selected records, and is
    restored when `train()` ends, even if it raises. A round that keeps fewer than two records is not trained on, unless
    it has no more; it is logged and counted in `skipped_rounds`.

    The model's logger gets `influence/dropped_share`, `influence/negative_share`, `influence/mean` (of the scores),
    `influence/seconds` and `influence/skipped_rounds`, so TensorBoard, CSV and W&B show them. SB3 writes them with the
    next round, as its own `train/` figures. Advice is logged once each, to the logger "whence" of Python's logging.
    `round` is the last round's result; `metrics` has a row a round.

    Override `choose` to score or select in another way, `train_selected` to train in another way, `check_model` to
    refuse models, and `settings` to add to the run's configuration.

    Args:
        rule: which records train: `IIF(drop=0.125)`, another rule of `whence`, or a `SelectionRule` of your own. None:
            all of them, to the same bits as without the callback; they are scored and recorded.
        target: what to raise; None: `Return()`.
        objective: what is differentiated; None: the model's own, without its value term (clip range, entropy
            coefficient, and whether it normalises advantages are read from the model).
        engine: see `attribute`.
        memory: bytes that scoring may hold at a time; see `attribute`.
        run: the directory to write each round to; see `RunDirectory`. None: nothing is written. If it holds an
            unfinished run of the same configuration, `learn()` continues where that was interrupted, to the same bits
            as if it had not been; see `whence.sb3.resume`. A finished run is left as it is.
        save_every: with `run`, rounds from one checkpoint to the next; 0: none are written, and no run continues.
            None: after every round, or after fewer of them, so that checkpoints take at most 2% of the time.
        overwrite: delete the run that the directory holds, and start anew.
        folds: with `run`, each score is written with its standard error over so many folds of episodes; see
            `attribute`. Nothing else depends on it. None: without errors.
        recordings: the rounds to record, from 1. A recording holds what `train()` did in the round, to be replayed and
            attributed as a whole. The last one is in `recording`; with `run`, all are in the directory.
        last: whether a last minibatch shorter than the others trains: "keep", or "drop" as LDA's code does.
        strict: raise if a round keeps fewer than two records, instead of skipping its training.
        env: with `run`, the name of a function without arguments that makes one environment in all of its wrappers, as
            "module:function". Episodes are played again in what it makes. None: the environment is made again by its
            class and its wrappers, as far as their arguments can be stored.
        names: of discrete actions or of the axes of others, and of the observation's entries, as pages show them:
            {"actions": [...], "observations": [...]}. What it lacks is read from the environment if that tells them:
            `action_names`, `get_action_meanings()`, or `observation_names`.
        verbose: 1 prints a line a round.

    Raises:
        WhenceError: an argument is not what it should be; or, raised by `learn()` before anything is trained, the
            callback is inside of one that acts at events, such as EvalCallback, or its run is another model's.
        NonFinite: raised by `learn()` before a step is taken on a number that is NaN or infinite; the message names
            the round, the record or the minibatch, and the parameter.
        Unsupported: raised by `learn()`, before anything is trained, for a model that whence cannot score. With a run
            and without a rule, its steps are recorded, and a warning says that they have no scores.
    """

    def __init__(
        self,
        rule: SelectionRule | None = None,
        *,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        memory: int | None = None,
        run: str | Path | RunDirectory | None = None,
        save_every: int | None = None,
        overwrite: bool = False,
        folds: int | None = FOLDS,
        recordings: Collection[int] = (),
        last: Last = "keep",
        strict: bool = False,
        env: str | None = None,
        names: Names | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        # Who asks for no choice gets a record of a training that cannot be scored, too.
        self._only_records = run is not None and rule is None and not recordings and type(self) is InfluenceCallback
        rule = ScoreAll() if rule is None else rule
        check_rule(rule, AGENT_UNITS)
        check_engine(engine)
        check_memory(memory)
        if last not in get_args(Last):
            raise WhenceError(f"last is {last!r}.{suggest(str(last), get_args(Last))}")
        self.rule, self.last, self.strict = rule, last, strict
        self.target = choose_target(rule, target, Return())
        self.objective = None if objective is None else as_objective(objective)
        self.env, self.names = check_factory(env), check_names(names or {})
        self.engine, self.memory, self.folds = engine, memory, check_folds(folds)
        self.recordings = check_recordings(recordings)
        self.optimisation_clock = Stopwatch()
        self._recorder, self._overwrite = None if run is None else RunRecorder(run, save_every=save_every), overwrite
        self._checkpoint: Checkpoint | None = None
        self._recorded: WatchedVecEnv | None = None
        self._start_model()

    def _start_model(self) -> None:
        """Begin with a model of which nothing has been scored."""
        self.round: RoundResult | None = None
        self.metrics: list[dict[str, Any]] = []
        self.recording: RoundRecording | None = None
        self._tracker: ResetTracker | None = None
        self._scored_model: Any = None
        self._state = CallbackState()

    def check_model(self) -> None:
        """Refuse a model that cannot be trained in this way; called when `learn()` begins.

        Raises:
            Unsupported: see `snapshot`; or rounds are to be recorded whose optimiser has several parameter groups.
        """
        check_model(self.model)
        if self.recordings:
            check_groups(self.model)

    def choose(self, records: RecordBatch) -> Choice:
        """Score a rollout and select the records to train on; override it to score or select in another way.

        Called when `train()` begins. It must leave the model as it is.

        Args:
            records: the rollout, n records in the order of the flattened buffer.

        Returns:
            Scores or None, a selection with one entry per record, and further metrics.
        """
        influence = None
        if self.rule.needs_influence:
            score: Any = partial(attribute, self.model.policy)
            if self._only_records:  # errors in the same pass; those of a selection are no part of it, and come after
                score = partial(attribute_with_errors, self.model.policy, self.folds, self._state.logged)
            score = partial(score, engine=self.engine, memory=self.memory)
            objective = self.objective or model_objective(self.model)
            influence = score_for(self.rule, records, score, target=self.target, objective=objective)
        return Choice(influence, self.select(records, influence))

    def _choose_if_scored(self, records: RecordBatch) -> Choice:
        """Return the choice; all records without scores if these cannot be had and nobody asked for a choice."""
        try:
            return self.choose(records)
        except Unsupported as refusal:
            if not self._only_records:
                raise
            warn_of_no_scores(self.model, str(refusal), self._state.logged)
            return Choice(None, self.select(records, None))

    def select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        """Return the rule's selection among records.

        Args:
            records: n records of the rollout.
            influence: their scores; None if the rule needs none.
        """
        # What `train()` will see: during a rollout, the model's own attribute holds the figure of the round before.
        remaining = 1 - self.model.num_timesteps / self.model._total_timesteps
        return self.rule.select(records, influence, Progress(self.next_round, max(0.0, remaining)))

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on the selected records; override it to train in another way.

        Args:
            train: SB3's own `train()`; call it here.
            selection: the selection that `choose` returned; it keeps at least two records.
        """
        assert self.round is not None
        recorder = Recorder(self.model) if self.round.number in self.recordings else None
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        with select_from(buffer, selection, last=self.last, recorder=recorder):
            train()
        if recorder is not None:
            self.recording = recorder.make_recording(self.round.number, self.round.records)
            if self._recorder is not None:
                self._recorder.write_file("recordings", self.recording.number, self.recording.save)

    def settings(self) -> dict[str, Any]:
        """Return how records are scored and selected, in JSON types, for the run's configuration."""
        return {
            **describe_scoring(self.rule, self.target, self.objective),
            "engine": self.engine,
            **({} if self.last == "keep" else {"last": self.last}),
            **({} if self.folds == FOLDS else {"folds": self.folds}),
            **({"names": self.names} if self.names else {}),
            **({} if self.env is None else {"env": self.env, "env_kwargs": {}}),
        }

    @property
    def next_round(self) -> int:
        """The number of the round that is about to be scored, from 1."""
        return self._state.rounds + 1

    @property
    def skipped_rounds(self) -> int:
        """The number of rounds that kept too few records to train on."""
        return self._state.skipped_rounds

    def _init_callback(self) -> None:
        cancel_hook(self.model)  # left by a learn() that was interrupted between a rollout and its training
        check_callers(self)
        self._recorded = None  # of a learn() that was interrupted, another recording takes its place
        try:
            self.check_model()
        except Unsupported as refusal:
            if not self._only_records or self._state.rounds or self._recorder is None:
                raise
            options: dict[str, Any] = {"names": self.names, "factory": self.env, "overwrite": self._overwrite}
            self._recorded = record_model(self.model, self._recorder.path, str(refusal), **options)
            return
        if self._state.rounds and is_other(self.model, self._scored_model, self.rule, self._recorder):
            self._start_model()
        claim_learn(self.model)
        if self._recorder is not None:
            self.names = read_names(self.model, self.names)
            start = open_run(self._recorder, self.model, self.settings(), self._tracker, overwrite=self._overwrite)
            self._checkpoint, self._tracker = start
        self._scored_model = self.model

    def _on_training_start(self) -> None:
        if self._recorded is not None:
            return
        if self._checkpoint is not None:
            self._load_state(self._checkpoint)
        else:
            self._state.begin_learn(self.model, self._tracker)
        record_next_rollout(self.model, self._tracker)

    def _load_state(self, checkpoint: Checkpoint) -> None:
        """Put everything where it was after the checkpoint's round."""
        assert self._recorder is not None
        assert self._tracker is not None
        self._checkpoint = None
        self._state = CallbackState.load(self.model, checkpoint, self.rule)
        self.metrics = self._recorder.directory.table("metrics").to_dicts()
        reason = restore_training(self.model, self._tracker, checkpoint)
        changes = self._tracker.list_changes(checkpoint.content["environments"])
        is_finished = self.model.num_timesteps >= self.model._total_timesteps
        self._recorder.continue_after(checkpoint, [*changes, *filter(None, [reason])], is_finished=is_finished)
        if reason is not None:
            self._state.begin_episodes(self.model)

    def _on_rollout_start(self) -> None:
        if self._recorded is not None:
            end_round_if_due(self.model, self._recorded)
            return
        self._collection_clock = Stopwatch()
        with name_round(self.next_round):
            check_observation(self.model, self.model._last_obs, self._state.ongoing.first_record)
        self._steps = EnvironmentSteps(self.model)

    def _on_step(self) -> bool:
        if self._recorded is not None:
            return True
        dones, step = self.locals["dones"], self.locals
        ended, infos = dones.nonzero()[0], list(step["infos"]) or [{}] * len(dones)  # a VecEnv may have none
        if self._tracker is not None:
            actions = step.get("clipped_actions", step["actions"])  # a MaskablePPO clips none
            self._tracker.step(actions, ended, infos)
        check_step(self.model, step, self.next_round, self._state.ongoing.first_record)
        self._steps.add(step["rewards"], dones, ended, infos, step.get("lstm_states"))
        return True

    def _on_rollout_end(self) -> None:
        if self._recorded is not None:
            return
        seconds = {"collection": self._collection_clock.seconds()}
        # Not here: callbacks and a collect_rollouts() of the model's own may still change the rollout.
        wrap_next(self.model, "train", lambda train: self._train_round(train, seconds))

    def _score_round(self, seconds: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Score the rollout, select from it, write it, and return its metrics."""
        check_model(self.model)  # again, since a callback may have replaced a part of it
        with time_stage(seconds, "scoring"), name_round(self.next_round):
            records, self._state.ongoing = read_buffer(self.model, self.model.rollout_buffer, self._state.ongoing)  # type: ignore[attr-defined]
            self._state.last_timestep = self.model.num_timesteps
            if self.rule.needs_influence and not self._state.rounds:
                warn_of_log_probs(self.model.policy, records)
            choice = self._choose_if_scored(records)
        check_selection(choice.selection, records, f"{type(self).__name__}.choose()", strict=self.strict)
        with time_stage(seconds, "errors"):  # no part of the selection, so no part of its time
            if self._recorder is not None:
                objective = self.objective or model_objective(self.model)
                settings: Any = {"objective": objective, "engine": self.engine, "memory": self.memory}
                scores = choice.influence, records, self.target, self.folds, self._state.logged
                choice = replace(choice, influence=estimate_errors(self.model.policy, *scores, **settings))
        self._state.rounds += 1
        self.round = RoundResult(self._state.rounds, records, choice.influence, choice.selection)
        self._state.skipped_rounds += not can_train(choice.selection)
        metrics = measure_choice(self.model, self._state.rounds, choice, self._steps)
        self.logger.record("influence/seconds", seconds["scoring"]["wall"])
        self.logger.record("influence/skipped_rounds", self.skipped_rounds)
        if self.verbose:
            skipped = ": skipped, training needs two" if metrics["skipped"] else ""
            print(f"whence: round {metrics['round']} keeps {metrics['kept']} of {metrics['records']} records{skipped}")
        if self._recorder is not None:
            write_round(self._recorder, self._tracker, self.model, self.round, self._steps, self._state.logged)
        return metrics

    def _train_round(self, train: Callable[[], None], seconds: dict[str, dict[str, float]]) -> None:
        """Score the rollout, train on the selection, unless that keeps too little, and write the round's rows."""
        metrics = self._score_round(seconds)
        assert self.round is not None
        self.optimisation_clock = Stopwatch()
        if not metrics["skipped"]:
            with name_round(self.round.number), watch_training(self.model, self.round.records, self._state.logged):
                self.train_selected(train, self.round.selection)
        seconds["optimisation"] = self.optimisation_clock.seconds()
        # The logger of a skipped round still holds an earlier round's.
        self.metrics.append({**metrics, **({} if metrics["skipped"] else read_train_metrics(self.model.logger))})
        call_plugin("whence.advice", "settings", self.metrics, read_settings(self.model), self._state.logged)
        if self._recorder is not None:
            self._recorder.write_rows(self.metrics[-1], seconds)
            self._save_if_due()
        record_next_rollout(self.model, self._tracker)

    def _on_training_end(self) -> None:
        if self._recorded is not None:
            stop_recording(self.model, self._recorded)
            self._recorded = None
            return
        cancel_hook(self.model)
        if self._recorder is not None:
            self._recorder.directory.write_policy(self._state.rounds + 1, named_tensors(self.model.policy))
            if self.model.num_timesteps == self._state.last_timestep:  # no checkpoint holds a part of a round
                self._save_if_due(last=True)
            self._recorder.end()

    def _save_if_due(self, *, last: bool = False) -> None:
        """Write the checkpoint after the round if one is due; after the last one in any case."""
        recorder, tracker, number = self._recorder, self._tracker, self._state.rounds
        if recorder is not None and tracker is not None and recorder.is_due(number, last=last):
            recorder.save_checkpoint(number, lambda: read_training(self.model, tracker, self._state.read(self.rule)))
