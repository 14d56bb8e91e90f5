"""PPO for causal language models, on the responses that a rule selects."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers.utils.logging import tqdm

from whence.errors import WhenceError
from whence.guards import preserve_rng_state
from whence.influence import Influence
from whence.llm import checkpoints, losses
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, Responses, check_tokenizer, generate
from whence.llm.model import Reference, WithValueHead
from whence.llm.objectives import TokenPPO
from whence.llm.processes import Processes
from whence.llm.prompts import NO_PROMPTS, Prompts, read_prompts
from whence.llm.rewards import Reward, combine_rewards
from whence.llm.rollout import Rollout, rolled_out
from whence.llm.scoring import check_held_out, held_out_target, score
from whence.llm.steps import optimise
from whence.llm.tables import make_metrics_row, make_response_table
from whence.llm.targets import SequenceReturn
from whence.objectives import Objective, as_objective
from whence.runs import RunDirectory, strip_addresses
from whence.selection import KeepAll, Progress, Selection, SelectionRule
from whence.stopwatch import Stopwatch
from whence.targets import Target, as_target, target_name

# What a training that goes on may have otherwise than it began.
_MAY_CHANGE = (
    "rounds",
    *(f"ppo.{name}" for name in ("save_every", "keep_checkpoints", "eval_every", "report_to", "disable_tqdm")),
    "ppo.generation_batch_size",
)

OnRollout = Callable[[Rollout, Influence | None, Selection, Mapping[str, Any]], None]
"""Called after each round with its rollout, scores, selection and metrics."""

Evaluate = Callable[[Any, Any], Mapping[str, float]]
"""`evaluate(language_model, tokenizer)` measures the model; numbers by name."""


class PPOTrainer:
    """Train a causal language model by PPO, with influence-based selection of responses where a rule is given.

    A round draws a response to each of `batch_size` prompts, rewards it, and computes advantages over the whole
    rollout; scores the rows and selects among them; and takes steps on those that are kept. A step's loss is

        -sum_i w_i p_i / sum_i w_i + vf_coef * mean_i v_i

    with `p_i` and `v_i` the means over a row's response tokens of the clipped objective and of the value loss: that of
    the kept rows alone. A round that keeps nothing takes no step.

    What happened is kept in `config.output_dir`, a run directory of whence's: `whence report` makes a page of it.
    Under `accelerate launch` each process takes a part of the rows; scores and selection are as with one.

    Args:
        config: settings.
        model: a causal language model of Transformers, whole or with a PEFT adapter, or a `WithValueHead`.
        tokenizer: its tokenizer.
        reward: `reward(prompts, responses) -> numbers`, or several; each is also given those of the data set's other
            columns that its arguments name: `reward(prompts, responses, answer)`.
        prompts: texts or chats; or a data set with a column "prompt".
        rule: which rows train; None: all, and nothing is scored.
        target: what scores are of; None: `SequenceReturn()`.
        held_out: prompts, as above, to which responses are drawn in every round for the target to be taken over; None:
            it is taken over the rows that are scored.
        objective: what a row's training raises; None: the clipped objective without the value loss.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time; the more, the quicker. None: what a pass over
            `config.mini_batch_size` rows holds, and the target's gradient.
        reward_weights: of several rewards.
        evaluate: measures the model before the first round, every `config.eval_every` rounds and after the last.
        about: what else the run directory is to say of the run, in JSON types.
        on_rollout: called after every round.

    Raises:
        WhenceError: a tokenizer without a pad token, prompts that do not fit, or a rule, target or reward that is none.
        Unsupported: processes that share the parameters out among them (FSDP, DeepSpeed).
    """

    def __init__(
        self,
        config: PPOConfig,
        model: Any,
        tokenizer: Any,
        reward: Reward | Sequence[Reward],
        prompts: Sequence[Prompt] | Any,
        *,
        rule: SelectionRule | None = None,
        target: Target | None = None,
        held_out: Sequence[Prompt] | Any | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        memory: int | None = None,
        reward_weights: Sequence[float] | None = None,
        evaluate: Evaluate | None = None,
        about: Mapping[str, Any] | None = None,
        on_rollout: OnRollout | None = None,
    ) -> None:
        check_tokenizer(tokenizer)
        if rule is not None and (isinstance(rule, type) or not isinstance(rule, SelectionRule)):
            raise WhenceError(f"rule is {rule!r}; pass an instance, such as IPPO(), or None to train on every row.")
        self.config, self.tokenizer, self.evaluate, self.on_rollout = config, tokenizer, evaluate, on_rollout
        rewards = [reward] if callable(reward) else list(reward)
        self.reward = combine_rewards(rewards, reward_weights)
        self.rule: SelectionRule = KeepAll() if rule is None else rule
        self.target = as_target(SequenceReturn() if target is None else target)
        self.objective = TokenPPO(clip_range=config.cliprange) if objective is None else as_objective(objective)
        self.engine, self.memory, self.about = engine, memory, dict(about or {})
        self.accelerator = Accelerator(log_with=list(config.report_to) or None, project_dir=config.output_dir)
        self.processes = Processes(self.accelerator)
        self._check_sizes()
        # The same numbers everywhere while the model is made, and each process's own for its responses.
        set_seed(config.seed)
        self.model = model if isinstance(model, WithValueHead) else WithValueHead(model)
        if config.disable_dropout:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        context = getattr(self.model.language_model.config, "max_position_embeddings", None)
        self.prompts = read_prompts(prompts, tokenizer, config, context, rewards)
        if not len(self.prompts):
            raise WhenceError(NO_PROMPTS)
        self.held_out = None if held_out is None else read_prompts(held_out, tokenizer, config, context, rewards)
        if self.held_out is not None and 0 < len(self.held_out) < self.processes.number:
            raise WhenceError(f"{len(self.held_out)} held-out prompts are fewer than the processes; give one for each.")
        apart = None if self.held_out is None else self.held_out.ids
        check_held_out(self.target, apart, self.prompts.ids, warn=self.accelerator.is_main_process)
        # Accelerate would wrap the model, for gradients' mean over processes and for mixed precision. Here gradients
        # are summed, since a step's loss has the denominators of all rows, and scores are computed as the model is.
        if not hasattr(self.model.language_model, "hf_device_map"):
            self.model = self.model.to(self.accelerator.device)
        self.processes.make_equal(self.model)
        self.reference = Reference(self.model)
        head = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
        groups = [
            {"params": [p for p in part.parameters() if p.requires_grad], "lr": rate}
            for part, rate in ((self.model.language_model, config.learning_rate), (self.model.value_head, head))
        ]
        self.optimizer = self.accelerator.prepare_optimizer(torch.optim.Adam(groups))
        self.kl = losses.KLController(
            config.init_kl_coef, config.target if config.adap_kl_ctrl else None, config.horizon
        )
        self.metrics: list[dict[str, Any]] = []
        self._generator = torch.Generator().manual_seed(config.seed)  # of prompts and of the order of rows
        self._waiting: list[int] = []
        self._run: RunDirectory | None = None
        set_seed(self._seed())

    def _seed(self, *what: int) -> int:
        """Return a seed of this process's own for something."""
        return int(np.random.SeedSequence([self.config.seed, self.processes.rank, *what]).generate_state(1)[0])

    def _check_sizes(self) -> None:
        if self.config.batch_size < self.processes.number:
            raise WhenceError(
                f"batch_size is {self.config.batch_size}, and there are {self.processes.number} processes; at least "
                "one row for each is needed."
            )
        # Passes are cut, and gradients summed, by the trainer itself.
        if self.accelerator.gradient_accumulation_steps > 1:
            raise WhenceError(
                "Accelerate's own gradient_accumulation_steps is "
                f"{self.accelerator.gradient_accumulation_steps}; set PPOConfig.gradient_accumulation_steps, and leave "
                "Accelerate's at 1."
            )

    def train(self, *, resume: bool = False) -> list[dict[str, Any]]:
        """Train all rounds and return a row of metrics for each.

        Args:
            resume: go on from the last checkpoint in `output_dir`, as if the training had not been broken off; from
                the start where there is none.

        Raises:
            RunDirectoryError: the checkpoint is of another model or other settings, or, without `resume`, output_dir
                holds something else than a run of these settings; such a run is started over.
        """
        config = self.config
        path = checkpoints.latest(config.output_dir) if resume else None
        if path is not None:
            # In every process, and before anything is changed.
            RunDirectory.open(config.output_dir).check_same(self._settings(), but=_MAY_CHANGE)
            self._restore(path)
        if self.accelerator.is_main_process:
            self._run = self._directory(path)
        if config.report_to:
            plain = {name: value for name, value in config.to_json().items() if isinstance(value, int | float | str)}
            self.accelerator.init_trackers("whence", plain)
        first = len(self.metrics) + 1
        if first == 1:
            self._evaluate(0)
        shown = not config.disable_tqdm and self.accelerator.is_main_process
        bar = tqdm(range(first, config.rounds + 1), desc="rounds", disable=not shown, unit="round")
        for number in bar:
            row = self._round(number)
            bar.set_postfix(
                reward=f"{row['reward']:.3g}", kl=f"{row['kl']:.3g}", kept=f"{1 - row['dropped_share']:.0%}"
            )
            if config.save_every and (number % config.save_every == 0 or number == config.rounds):
                self._checkpoint(number)
        for tracker in self.accelerator.trackers:  # `end_training` would also part the processes
            tracker.finish()
        return self.metrics

    def _round(self, number: int) -> dict[str, Any]:
        config, seconds = self.config, dict[str, dict[str, float]]()
        prompts = self._drawn_prompts()
        with _timed(seconds, "generation"), self.accelerator.autocast():
            responses = self._responses(prompts)
        with _timed(seconds, "forward"), self.accelerator.autocast():
            rollout = self._rolled_out(responses, prompts, (number - 1) * config.batch_size)
        with _timed(seconds, "scoring"):
            influence = None
            if self.rule.needs_influence:
                target = self._target(number, seconds)
                influence = score(
                    *(self.model, rollout.rows, target, self.objective, config.temperature),
                    *(self.engine, self.memory, config.mini_batch_size, self.processes),
                )
            selection = self.rule.select(rollout.rows, influence, Progress(number, 1 - (number - 1) / config.rounds))
        with _timed(seconds, "optimisation"):
            trained = optimise(
                *(self.model, self.optimizer, rollout.rows, selection, config),
                *(self._generator, self.accelerator, self.processes),
            )
        row = {**make_metrics_row(number, rollout, selection, influence), "kl_coef": self.kl.coefficient, **trained}
        self.kl.update(row["kl"], len(rollout.rows))
        self.metrics.append(row)
        self._tell(rollout, influence, selection, row, seconds)
        if config.eval_every and (number % config.eval_every == 0 or number == config.rounds):
            self._evaluate(number)
        return row

    def _drawn_prompts(self) -> Prompts:
        """Draw prompts without replacement, and begin anew when all have been drawn."""
        while len(self._waiting) < self.config.batch_size:
            self._waiting += torch.randperm(len(self.prompts), generator=self._generator).tolist()
        chosen, self._waiting = self._waiting[: self.config.batch_size], self._waiting[self.config.batch_size :]
        return self.prompts.take(chosen)

    def _responses(self, prompts: Prompts) -> Responses:
        return generate(self.model.language_model, self.tokenizer, prompts.ids, self.config, self.processes)

    def _rolled_out(self, responses: Responses, prompts: Prompts, first_id: int) -> Rollout:
        return rolled_out(
            *(self.model, self.reference, responses, self.reward, self.kl.coefficient, self.config),
            *(first_id, self.processes, prompts.columns),
        )

    def _target(self, number: int, seconds: dict[str, dict[str, float]]) -> Target:
        """Return the target of a round; held-out prompts get responses that leave training's own draws as they are."""
        if self.held_out is None:
            return self.target
        with _timed(seconds, "held_out"), preserve_rng_state(), self.accelerator.autocast():
            set_seed(self._seed(number))
            rollout = self._rolled_out(self._responses(self.held_out), self.held_out, 0)
            return held_out_target(self.target, rollout.rows)

    def _tell(
        self,
        rollout: Rollout,
        influence: Influence | None,
        selection: Selection,
        row: Mapping[str, Any],
        seconds: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Write a round down, and tell trackers and `on_rollout` of it."""
        if self._run is None:
            return
        number = row["round"]
        self._run.write_round("records", number, make_response_table(rollout, selection, influence))
        self._run.append("metrics", row)
        flat = {f"{stage}_{clock}": value for stage, clocks in seconds.items() for clock, value in clocks.items()}
        self._run.append("timings", {"round": number, **flat})
        numbers = {name: value for name, value in row.items() if value is not None and name != "round"}
        walls = {f"seconds/{stage}": clocks["wall"] for stage, clocks in seconds.items()}
        self.accelerator.log(numbers | walls, step=number)
        if self.on_rollout is not None:
            self.on_rollout(rollout, influence, selection, row)

    def _evaluate(self, number: int) -> None:
        if self.evaluate is None or not self.config.eval_every or self._run is None:
            return
        with preserve_rng_state():
            found = dict(self.evaluate(self.model.language_model, self.tokenizer))
        self._run.append("evaluations", {"round": number, **found})
        self.accelerator.log({f"test/{name}": value for name, value in found.items()}, step=number)

    def _settings(self) -> dict[str, Any]:
        ppo = self.config.to_json()
        own = {name: ppo.pop(name) for name in ("output_dir", "rounds", "seed")}
        return {
            "kind": "language",
            **self.about,
            "model": getattr(self.model.language_model.config, "_name_or_path", "") or None,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "trained_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "rule": strip_addresses(repr(self.rule)),
            "target": strip_addresses(target_name(self.target)),
            "held_out": 0 if self.held_out is None else len(self.held_out),
            "objective": strip_addresses(repr(self.objective)),
            "engine": self.engine,
            "processes": self.processes.number,
            "device": str(self.accelerator.device),
            "rounds": own["rounds"],
            "seed": own["seed"],
            "ppo": ppo,
        }

    def _directory(self, checkpoint: Path | None) -> RunDirectory:
        folder, settings = self.config.output_dir, self._settings()
        if checkpoint is not None:
            return RunDirectory.resume(folder, settings, rounds=len(self.metrics), may_change=_MAY_CHANGE)
        made = RunDirectory.create(folder, settings, versions={name: version(name) for name in _LIBRARIES})
        shutil.rmtree(Path(folder) / "checkpoints", ignore_errors=True)
        return made

    def _checkpoint(self, number: int) -> None:
        """Write how things stand after a round, and delete the oldest such files."""
        generators = {"own": self._generator.get_state(), **self.processes.generators()}
        if not self.accelerator.is_main_process:
            return
        about = {"metrics": self.metrics, "kl_coef": self.kl.coefficient, "waiting": self._waiting}
        path = checkpoints.checkpoint_path(self.config.output_dir, number)
        checkpoints.save(path, self.model, self.optimizer.optimizer, about, generators)
        for old in sorted(path.parent.glob("round_*.safetensors"))[: -self.config.keep_checkpoints]:
            old.unlink()

    def _restore(self, path: Path) -> None:
        done = int(path.stem.removeprefix("round_"))
        if done > self.config.rounds:
            raise WhenceError(f"rounds is {self.config.rounds}, and {path} is of {done} rounds; more are needed.")
        about, generators = checkpoints.load(path, self.model, self.optimizer.optimizer)
        self.metrics, self._waiting, self.kl.coefficient = about["metrics"], about["waiting"], about["kl_coef"]
        self._generator.set_state(generators.pop("own"))
        self.processes.set_generators(generators)

    def save_model(self, folder: str | Path | None = None) -> None:
        """Write model (or adapter), value head and tokenizer, as Transformers loads them."""
        if not self.accelerator.is_main_process:
            return
        folder = Path(self.config.output_dir) / "model" if folder is None else Path(folder)
        self.accelerator.unwrap_model(self.model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


_LIBRARIES = ("whence", "torch", "transformers", "accelerate")


@contextmanager
def _timed(seconds: dict[str, dict[str, float]], stage: str) -> Iterator[None]:
    """Note how long a stage takes, without the stages within it."""
    before, watch = dict(seconds), Stopwatch()
    yield
    within = [clocks for name, clocks in seconds.items() if name not in before]
    found = watch.seconds()
    seconds[stage] = {clock: value - sum(clocks[clock] for clocks in within) for clock, value in found.items()}
