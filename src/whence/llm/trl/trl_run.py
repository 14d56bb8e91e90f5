"""The run directory of a training by TRL's trainers, and what it adds to Transformers' checkpoints.

Some of their files are pickles (optimizer.pt, rng_state.pth), which Transformers itself loads as plain tensors and
arrays (`weights_only=True`); whence loads none of them. Its own file comes last, so a checkpoint without it was being
written when the process was killed, and is passed over.
"""

import logging
import math
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import polars as pl
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerState

from whence.core import RunDirectoryError, WhenceError, library_versions, require_file
from whence.llm.base import average_rows, describe_run, describe_settings, is_secret, list_infos, list_tokens
from whence.llm.text import join_messages, list_chats, list_vocabulary
from whence.llm.trl.completions import PassSignals, list_pass_signals
from whence.runs import (
    Checkpoint,
    RunDirectory,
    RunRecorder,
    load_states,
    load_tree,
    read_digests,
    read_states,
    save_tree,
)
from whence.selection import Selection, add_selection, summarise_selection

log = logging.getLogger("whence")

_FILE = "whence.safetensors"
"""What whence adds to a checkpoint: the run's id, and what Transformers does not keep."""

RUN_ID = "id"
"""The note that tells a run's checkpoints from those of another run that was in the same directory before."""

_LIBRARIES = ("whence", "torch", "transformers", "trl", "accelerate")
_NOT_OF_THE_STEPS = (
    *("save_strategy", "save_steps", "save_total_limit"),
    *("logging_strategy", "logging_steps", "report_to", "disable_tqdm"),
)
_MAY_CHANGE = ("rounds", "output_dir", *(f"trl.{name}" for name in _NOT_OF_THE_STEPS))
_ELSEWHERE = ("output_dir", "logging_dir", "run_name", "max_steps", "seed")
# They say nothing of the training, and hub_token is a secret.
_OF_THE_HUB = ("hub_", "push_to_hub")


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Writes each generation batch to a run directory, after the last step on it; completes Transformers' checkpoints.

    Args:
        trainer: a trainer of `whence.llm.trl.trainers`.
        folder: the run directory.
        about: a further description of the run, in JSON types.
        overwrite: delete the rounds of the run in the directory that come after the start of this training.

    Raises:
        WhenceError: a step would be on parts of two generation batches.
    """

    def __init__(
        self, trainer: Any, folder: str | Path, about: Mapping[str, Any] | None = None, *, overwrite: bool = False
    ) -> None:
        self._trainer, self._about, self._overwrite = trainer, dict(about or {}), overwrite
        self.recorder = RunRecorder(folder, writes=trainer.accelerator.is_main_process)
        batches, accumulation = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
        if batches % accumulation:
            raise WhenceError(
                f"steps_per_generation is {batches} and gradient_accumulation_steps {accumulation}; a round of a run "
                "directory is a generation batch, so the first has to be a multiple of the second."
            )
        self._steps = count_steps(trainer.args)
        self._clears_after: int | None = None
        self._batch: tuple[pl.DataFrame, dict[str, Any]] | None = None
        self._texts: dict[str, Any] = {}
        self.signals = PassSignals()
        self._start: Checkpoint | None = None
        self._choice: dict[str, Any] = {}

    def find_checkpoint(self) -> Checkpoint | None:
        """Return the last whole checkpoint of this run, not of one that was in the directory before."""
        if not (self.recorder.path / "config.json").exists():
            return None
        run_id = RunDirectory.open(self.recorder.path).notes.get(RUN_ID, "")
        folders = reversed(_list_checkpoints(self._trainer.args.output_dir).items())
        for step, folder in folders:
            try:
                if read_run_id(folder) == run_id:
                    _check_files(folder)
                    return Checkpoint(step // self._steps, {}, folder)
            except RunDirectoryError as damage:
                log.warning("%s The checkpoint before it is taken, if there is one.", damage)
        return None

    def choose_checkpoint(self, resume: str | Path | bool | None) -> Path | None:
        """Return the checkpoint to continue from, or None; nothing is changed. Call it in every process.

        Args:
            resume: `resume_from_checkpoint` of Transformers: a checkpoint's folder; True: the last whole one.

        Raises:
            RunDirectoryError: see `RunDirectory.find_start`; or there is no checkpoint, or it lies within a round.
        """
        latest, folder = self.find_checkpoint(), self.recorder.path
        self.recorder = RunRecorder(folder, writes=self.recorder.writes)  # the one of an earlier training has ended
        if resume is True and latest is None:
            raise RunDirectoryError(
                f"{self._trainer.args.output_dir} holds no whole checkpoint of the run in {folder}. Train without "
                "resume_from_checkpoint; if the directory holds a run, pass overwrite=True to replace it."
            )
        self._start = latest if resume is True else None
        if isinstance(resume, str | Path):
            self._start = self._read_start(Path(resume))
        # Without an argument a training starts anew; one that was killed before its first checkpoint did so, too.
        start = ("latest" if latest is None else "anew") if self._start is None else self._start
        self._choice = {
            "start": start,
            "overwrite": self._overwrite,
            "may_change": _MAY_CHANGE,
            "find": lambda path: latest,  # its files were read, which takes long
            "remedy": "To go on with the run, call trainer.train(resume_from_checkpoint=True). ",
        }
        RunDirectory.find_start(folder, self._describe(0), **self._choice)
        return None if self._start is None else self._start.path

    def _read_start(self, folder: Path) -> Checkpoint:
        _check_files(folder)
        done, rest = divmod(read_progress(folder).global_step, self._steps)
        if rest:
            raise RunDirectoryError(
                f"{folder} lies within a round, whose responses would be drawn again. Take another one."
            )
        return Checkpoint(done, {}, folder)

    def is_finished(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is that of a training's last step."""
        progress, args = read_progress(checkpoint), self._trainer.args
        same_epochs = progress.num_train_epochs == args.num_train_epochs
        total = args.max_steps if args.max_steps > 0 else progress.max_steps if same_epochs else math.inf
        if finished := progress.global_step >= total:
            log.warning(
                "%s holds this run, finished: nothing is trained. To train anew, pass overwrite=True.",
                self.recorder.path,
            )
        return bool(finished)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Open the directory, and put back what Transformers' checkpoint does not hold."""
        if self._start is not None:
            self._load_state(self._start.path, state.global_step)
        self._trainer._processes.wait()  # until all have read what the first one may change
        recorder = self.recorder
        if not recorder.writes:
            return
        rounds, versions = -(-state.max_steps // self._steps), library_versions(_LIBRARIES)
        shared = Path(args.output_dir).resolve().is_relative_to(recorder.path.resolve())
        checkpoint = recorder.begin(self._describe(rounds), versions=versions, shared=shared, **self._choice)
        if checkpoint is not None:
            log.warning("%s: going on after round %d of %d.", recorder.path, checkpoint.round, rounds)
            recorder.continue_after(checkpoint)
            recorder.note_resumption()
        self._clears_after = state.global_step if checkpoint is not None or (shared and not state.global_step) else None
        if RUN_ID not in recorder.directory.notes:
            recorder.directory.note(**{RUN_ID: uuid.uuid4().hex})
        recorder.plan_vocabulary(lambda: list_vocabulary(self._trainer._tokenizer))

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Complete a checkpoint that Transformers has written; no training continues from one without an optimiser."""
        if args.save_only_model:
            return
        if state.global_step % self._steps:
            log.warning("checkpoint-%d lies within a round, so training cannot go on from it.", state.global_step)
            return
        states = [self._read_state()]
        if args.world_size > 1:
            states = gather_object(states)  # all processes have written their files now
        if self.recorder.writes:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            content = {
                "run": self.recorder.directory.notes[RUN_ID],
                "processes": states,
                "files": read_digests(folder),
            }
            if (chooser := self._trainer.chooser) is not None:
                content["target_gradient"] = chooser.gradient
            save_tree(folder / _FILE, content)

    def _read_state(self) -> dict[str, Any]:
        """Return the state that Transformers does not keep: of rule and rewards, and of a reference that changes."""
        reference = self._find_reference()
        return {
            "user": read_states(self._list_parts()),
            "reference": None if reference is None else dict(reference.state_dict()),
        }

    def _load_state(self, checkpoint: Path, step: int) -> None:
        trainer = self._trainer
        # TRL draws a new generation batch at multiples of a round's passes, which it counts anew in each process.
        trainer._step, trainer._buffered_inputs = step * trainer.args.gradient_accumulation_steps, None
        if not (checkpoint / _FILE).exists():
            return
        content = load_tree(checkpoint / _FILE)
        if trainer.chooser is not None:
            trainer.chooser.restore(content.get("target_gradient"))
        state = content["processes"][trainer.args.process_index]
        load_states(self._list_parts(), state["user"])
        if state["reference"] is not None and (reference := self._find_reference()) is not None:
            reference.load_state_dict(state["reference"])

    def _find_reference(self) -> Any:
        """Return the reference model if it changes; else None."""
        model = self._trainer.ref_model if getattr(self._trainer.args, "sync_ref_model", False) else None
        return None if model is None else self._trainer.accelerator.unwrap_model(model)

    def _list_parts(self) -> list[Any]:
        """Return the rule, and the rewards but reward models, which do not change."""
        rewards = [each for each in self._trainer.reward_funcs if not isinstance(each, torch.nn.Module)]
        return [self._trainer.rule, *rewards]

    @contextmanager
    def note_texts(self) -> Iterator[None]:
        """Take the texts of the generation batch that is made in this context from what TRL logs of it.

        Later an evaluation takes their place. What reward functions log by TRL's `log_extra` in some batches alone
        would stay, so it is gathered apart.
        """
        logs, size = self._trainer._logs, self._trainer.args.generation_batch_size
        before, logs["extra"] = logs["extra"], defaultdict(list)
        try:
            yield
            extra = {name: values for name, values in logs["extra"].items() if len(values) == size}
            texts = {name: list(logs[name])[-size:] for name in ("prompt", "completion", "advantages")}
            self._texts = {**texts, "extra": dict(extra)}
        finally:
            for name, values in logs["extra"].items():
                before[name].extend(values)
            logs["extra"] = before

    def note_batch(self) -> None:
        """Make the table of a generation batch of which is known which completions train."""
        trainer, logs = self._trainer, self._texts
        if not self.recorder.writes:
            return
        if self._clears_after is not None:  # now that responses were made and rewarded
            self.recorder.directory.prepare_writing()
            for step, folder in _list_checkpoints(trainer.args.output_dir).items():
                if step > self._clears_after:  # training comes there again, and Transformers counts them
                    shutil.rmtree(folder, ignore_errors=True)
            self._clears_after = None
        chats = {"prompt": logs["prompt"], "response": logs["completion"]}
        parts = {f"reward.{name}": rewards for name, rewards in trainer.rewards_by_function.items()}
        reward, *rewards = (
            pl.Series(name, values.tolist(), dtype=pl.Float64).fill_nan(None)
            for name, values in {"reward": trainer._rewards, **(parts if len(parts) > 1 else {})}.items()
        )
        table = pl.DataFrame({name: list(map(join_messages, texts)) for name, texts in chats.items()}).with_columns(
            *(reward, pl.Series("advantage", logs["advantages"], dtype=pl.Float64), *rewards),
            *list_infos({**trainer.prompt_columns, **logs["extra"]}),
            *list_chats(chats),
        )
        if trainer.rows is not None:
            lengths = trainer.rows.observations["response_mask"].sum(dim=1)
            tokens = list_tokens(trainer.rows)
            groups = pl.Series("group_id", trainer.rows.group_ids.tolist())
            ended = pl.Series("ended", self._list_ended(tokens[1].to_list()))
            table = table.with_columns(groups, pl.Series("tokens", lengths.tolist()), ended, *tokens)
        everything = Selection.dropping(torch.ones(len(table), dtype=torch.bool), "")
        selection, influence = trainer.selection or everything, trainer.influence
        table = add_selection(table, selection, influence)
        kept, dropped = (table.filter(keep=keep)["reward"].mean() for keep in (True, False))
        metrics = {"reward_kept": kept, "reward_dropped": dropped, **summarise_selection(selection, influence)}
        self._batch = table, metrics

    def _list_ended(self, responses: list[list[int]]) -> list[bool]:
        """Return whether each response ends in a token that ends it; TRL empties those that were cut, if asked to."""
        tokenizer = self._trainer._tokenizer
        # TRL before 1.15 knows one token that ends.
        ends = {*getattr(self._trainer, "eos_token_ids", [tokenizer.eos_token_id]), tokenizer.pad_token_id}
        return [bool(ids) and ids[-1] in ends for ids in responses]

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the generation batch after the last of its steps."""
        number, rest_of_round = divmod(state.global_step, self._steps)
        if rest_of_round:
            return
        passes = self.signals.take(args.world_size)
        if self._batch is None:
            return
        (table, metrics), seconds, self._batch = self._batch, self._trainer.seconds, None
        if passes and self._trainer.rows is not None:
            lengths = table["response_ids"].list.len().to_list()
            table = table.with_columns(list_pass_signals(passes, self._trainer.rows, lengths, args))
        ids = pl.Series("record_id", range((number - 1) * len(table), number * len(table)), dtype=pl.Int64)
        self.recorder.write_round(number, table.select(ids, pl.all()))
        self.recorder.write_rows({"round": number, **average_rows(table), **metrics}, seconds)
        seconds.clear()

    def _describe(self, rounds: int) -> dict[str, Any]:
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        return {
            "algorithm": "rloo" if "RLOO" in type(trainer.args).__name__ else "grpo",
            **self._about,
            **describe_run(trainer, model, trainer.reward_funcs, prompts=trainer.train_dataset),
            **{"rounds": rounds, "seed": trainer.args.seed, "output_dir": self._name_output_dir()},
            **({} if trainer.chooser is None else {"select": "in_step", "refresh": trainer.refresh_target_every}),
            "trl": _list_settings(trainer.args),
        }

    def _name_output_dir(self) -> str:
        """Return the folder of Transformers' checkpoints; inside the run's directory, which may move, from there."""
        folder, run = Path(self._trainer.args.output_dir).resolve(), self.recorder.path.resolve()
        return str(folder.relative_to(run) if folder.is_relative_to(run) else folder)


def count_steps(args: Any) -> int:
    """Return the optimiser's steps of a round, a generation batch, by TRL's settings."""
    return int(args.num_iterations * (args.steps_per_generation // args.gradient_accumulation_steps))


def read_run_id(checkpoint: Path) -> str | None:
    """Return the id that the notes of a checkpoint's run hold; None of a checkpoint that whence has not completed."""
    return load_tree(checkpoint / _FILE)["run"] if (checkpoint / _FILE).exists() else None


def read_progress(checkpoint: Path) -> Any:
    """Return Transformers' description of a checkpoint: `global_step`, `max_steps`, `epoch` and more."""
    return TrainerState.load_from_json(str(require_file(checkpoint / "trainer_state.json")))


def _check_files(checkpoint: Path) -> None:
    """Refuse a checkpoint of which a file is not as it was when whence's own was written, if there is one."""
    if not (checkpoint / _FILE).exists():
        return
    stored, present = load_tree(checkpoint / _FILE).get("files", {}), read_digests(checkpoint)
    if changed := [name for name, digest in stored.items() if name != _FILE and present.get(name) != digest]:
        raise RunDirectoryError(
            f"{checkpoint / changed[0]} is damaged or missing: it does not have the checksum that was written with "
            "the checkpoint. Restore it from a copy, or go on from another checkpoint."
        )


def _list_checkpoints(output_dir: str | Path) -> dict[int, Path]:
    """Return the folders of Transformers' checkpoints, whole or not, by the optimiser's steps before each."""
    folders = (folder for folder in Path(output_dir).glob("checkpoint-*") if folder.name[11:].isdecimal())
    return dict(sorted((int(folder.name[11:]), folder) for folder in folders))


def _list_settings(args: Any) -> dict[str, Any]:
    """Return TRL's settings of the training that differ from their defaults, in JSON types and without secrets."""
    settings = {}
    for one in fields(args):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.name in _ELSEWHERE or one.name.startswith(_OF_THE_HUB) or is_secret(one.name):
            continue
        if (value := describe_settings(getattr(args, one.name))) != describe_settings(default):
            settings[one.name] = value
    return settings
