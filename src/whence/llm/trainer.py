"""PPO for causal language models, on the responses that a rule selects."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.attribution import attribute
from whence.errors import RunDirectoryError, WhenceError
from whence.influence import Influence
from whence.llm import checkpoints, losses
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, check_tokenizer, generate, tokenized
from whence.llm.model import Reference, WithValueHead
from whence.llm.objectives import TokenPPO
from whence.llm.rewards import Reward, weighed
from whence.llm.rollout import Rollout, rolled_out
from whence.llm.targets import SequenceReturn
from whence.llm.view import language_view
from whence.objectives import Objective
from whence.policies import ModuleView
from whence.records import RecordBatch
from whence.selection import KeepAll, Progress, Selection, SelectionRule
from whence.targets import Target, as_target

# What a training that goes on may have otherwise than it began.
_MAY_CHANGE = ("output_dir", "rounds", "save_every", "keep_checkpoints", "report_to", "generation_batch_size")

Seen = Callable[[Rollout, Influence | None, Selection, Mapping[str, Any]], None]
"""Called after each round with its rollout, scores, selection and metrics."""


class PPOTrainer:
    """Train a causal language model by PPO, with influence-based selection of responses where a rule is given.

    A round draws a response to each of `batch_size` prompts, rewards it, and computes advantages over the whole
    rollout; scores the rows and selects among them; and takes steps on those that are kept. A step's loss is

        -sum_i w_i p_i / sum_i w_i + vf_coef * mean_i v_i

    with `p_i` and `v_i` the means over a row's response tokens of the clipped objective and of the value loss: that of
    the kept rows alone. A round that keeps nothing takes no step.

    Args:
        config: settings.
        model: a causal language model of Transformers, whole or with a PEFT adapter, or a `WithValueHead`.
        tokenizer: its tokenizer.
        reward: `reward(prompts, responses) -> numbers`, or several.
        prompts: texts or chats; or a data set with a column "prompt".
        rule: which rows train; None: all, and nothing is scored.
        target: what scores are of; None: `SequenceReturn()`.
        objective: what a row's training raises; None: the clipped objective without the value loss.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time.
        reward_weights: of several rewards.
        seen: told of every round.

    Raises:
        WhenceError: a tokenizer without a pad token, prompts that do not fit, or a rule, target or reward that is none.
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
        objective: Objective | None = None,
        engine: str = "auto",
        memory: int = 2**31,
        reward_weights: Sequence[float] | None = None,
        seen: Seen | None = None,
    ) -> None:
        check_tokenizer(tokenizer)
        if rule is not None and (isinstance(rule, type) or not isinstance(rule, SelectionRule)):
            raise WhenceError(f"rule is {rule!r}; pass an instance, such as IPPO(), or None to train on every row.")
        self.config, self.tokenizer, self.seen = config, tokenizer, seen
        self.reward = weighed([reward] if callable(reward) else list(reward), reward_weights)
        self.rule: SelectionRule = KeepAll() if rule is None else rule
        self.target = as_target(SequenceReturn() if target is None else target)
        self.objective = TokenPPO(clip_range=config.cliprange) if objective is None else objective
        self.engine, self.memory = engine, memory
        self.accelerator = Accelerator(log_with=list(config.report_to) or None, project_dir=config.output_dir)
        if self.accelerator.num_processes > 1:
            raise WhenceError("Several processes are not supported yet; start one.")
        set_seed(config.seed)
        self.model = model if isinstance(model, WithValueHead) else WithValueHead(model)
        if config.disable_dropout:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        context = getattr(self.model.language_model.config, "max_position_embeddings", None)
        self.prompts = tokenized(tokenizer, _texts(prompts), config, context)
        if not self.prompts:
            raise WhenceError("There are no prompts to draw responses to.")
        self.reference = Reference(self.model)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=config.learning_rate)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.kl = losses.KLController(
            config.init_kl_coef, config.target if config.adap_kl_ctrl else None, config.horizon
        )
        self.metrics: list[dict[str, Any]] = []
        self._generator = torch.Generator().manual_seed(config.seed)  # of prompts and of the order of rows
        self._waiting: list[int] = []

    def train(self, *, resume: bool = False) -> list[dict[str, Any]]:
        """Train all rounds and return a row of metrics for each.

        Args:
            resume: go on from the last checkpoint in `output_dir`, as if the training had not been broken off; from
                the start where there is none.

        Raises:
            RunDirectoryError: the checkpoint is of another model or other settings.
        """
        config = self.config
        if resume and (path := checkpoints.latest(config.output_dir)) is not None:
            self._restore(path)
        if config.report_to:
            plain = {name: value for name, value in config.to_json().items() if isinstance(value, int | float | str)}
            self.accelerator.init_trackers("whence", plain)
        for number in range(len(self.metrics) + 1, config.rounds + 1):
            row = self._round(number)
            self.accelerator.log({name: value for name, value in row.items() if value is not None}, step=number)
            if config.save_every and (number % config.save_every == 0 or number == config.rounds):
                self._checkpoint(number)
        self.accelerator.end_training()
        return self.metrics

    def _checkpoint(self, number: int) -> None:
        """Write how things stand after a round, and delete the oldest such files."""
        about = {"config": self.config.to_json(), "metrics": self.metrics, "kl_coef": self.kl.coefficient}
        about["waiting"] = self._waiting
        generators = {"own": self._generator.get_state(), "torch": torch.get_rng_state()}
        path = checkpoints.checkpoint_path(self.config.output_dir, number)
        checkpoints.save(path, self.model, self.optimizer.optimizer, about, generators)
        for old in sorted(path.parent.glob("round_*.safetensors"))[: -self.config.keep_checkpoints]:
            old.unlink()

    def _restore(self, path: Path) -> None:
        about, generators = checkpoints.load(path, self.model, self.optimizer.optimizer)
        mine = self.config.to_json()
        if others := [name for name in mine if name not in _MAY_CHANGE and about["config"].get(name) != mine[name]]:
            raise RunDirectoryError(
                f"{path} is of other settings: {others[0]} was {about['config'].get(others[0])!r}, now "
                f"{mine[others[0]]!r}. Choose another output_dir, or train without resume."
            )
        self.metrics, self._waiting, self.kl.coefficient = about["metrics"], about["waiting"], about["kl_coef"]
        self._generator.set_state(generators["own"])
        torch.set_rng_state(generators["torch"])

    def _round(self, number: int) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        with _timed(seconds, "generation"):
            responses = generate(self.model.language_model, self.tokenizer, self._drawn_prompts(), self.config)
        with _timed(seconds, "forward"):
            first = (number - 1) * self.config.batch_size
            rollout = rolled_out(
                self.model, self.reference, responses, self.reward, self.kl.coefficient, self.config, first
            )
        with _timed(seconds, "scoring"):
            influence = self._influence(rollout.rows)
            progress = Progress(number, 1 - (number - 1) / self.config.rounds)
            selection = self.rule.select(rollout.rows, influence, progress)
        with _timed(seconds, "optimisation"):
            trained = self._optimise(rollout.rows, selection)
        divergence = float(rollout.divergence.mean())
        row = {
            "round": number,
            "reward": float(rollout.rewards.mean()),
            "kl": divergence,
            "kl_coef": self.kl.coefficient,
            "entropy": rollout.entropy,
            "length": float(responses.response_mask.sum(dim=1).double().mean()),
            "ended_share": float(responses.ended.double().mean()),
            "kept_share": float(selection.keep.double().mean()),
            **trained,
            **{f"seconds_{stage}": value for stage, value in seconds.items()},
        }
        self.kl.update(divergence, len(rollout.rows))
        self.metrics.append(row)
        if self.seen is not None:
            self.seen(rollout, influence, selection, row)
        return row

    def _drawn_prompts(self) -> list[list[int]]:
        """Draw prompts without replacement, and begin anew when all have been drawn."""
        while len(self._waiting) < self.config.batch_size:
            self._waiting += torch.randperm(len(self.prompts), generator=self._generator).tolist()
        chosen, self._waiting = self._waiting[: self.config.batch_size], self._waiting[self.config.batch_size :]
        return [self.prompts[at] for at in chosen]

    def _influence(self, rows: RecordBatch) -> Influence | None:
        if not self.rule.needs_influence:
            return None
        return attribute(
            self._view(), rows, target=self.target, objective=self.objective, engine=self.engine, memory=self.memory
        )

    def _view(self) -> ModuleView:
        return language_view(self.model, temperature=self.config.temperature)

    def _optimise(self, rows: RecordBatch, selection: Selection) -> dict[str, float | None]:
        """Train on the kept rows, and return means over all steps."""
        config, totals = self.config, []
        self.model.train()
        for _ in range(config.ppo_epochs):
            # Drawn over all rows and filtered then, so that runs that drop different rows share their orders.
            order = torch.randperm(len(rows), generator=self._generator)
            kept = order[selection.keep[order]]
            steps = kept.split(config.mini_batch_size * config.gradient_accumulation_steps) if len(kept) else ()
            totals += [self._step(rows, chosen, selection.weights) for chosen in steps]
        names = ("policy_loss", "value_loss", "approx_kl", "clip_fraction")
        if not totals:
            return dict.fromkeys(names)
        return dict(zip(names, torch.stack(totals).mean(dim=0).tolist(), strict=True))

    def _step(self, rows: RecordBatch, chosen: Int[Tensor, " b"], weights: Float[Tensor, " n"]) -> Float[Tensor, "4"]:
        """Take one step of the optimiser on some rows; return policy loss, value loss, divergence, clipped share."""
        config, view = self.config, self._view()
        total, seen = float(weights[chosen].sum()) or 1.0, torch.zeros(4)
        params = view.parameters()
        for part in chosen.split(config.mini_batch_size):
            own = rows.take(part).to(self.accelerator.device)
            outputs = view.only({"log_prob", "value"}, params, view.prepare(own))
            assert outputs.value is not None
            assert isinstance(own.observations, dict)
            given = own.observations
            mask, old = given["response_mask"], given["log_probs"]
            policy = losses.masked_mean(
                losses.surrogate(outputs.log_prob, old, given["advantages"], config.cliprange), mask
            )
            value = losses.masked_mean(
                losses.value_loss(outputs.value, given["values"], given["returns"], config.cliprange_value), mask
            )
            weighed_loss = -(weights[part].to(policy) * policy).sum() / total
            self.accelerator.backward(weighed_loss + config.vf_coef * value.sum() / len(chosen))
            with torch.no_grad():
                ratio = (outputs.log_prob - old).exp()
                apart = losses.masked_mean(ratio - 1 - (outputs.log_prob - old), mask).sum()
                clipped = losses.masked_mean(((ratio - 1).abs() > config.cliprange).to(ratio), mask).sum()
                shares = torch.stack([value.sum(), apart, clipped]).cpu() / len(chosen)
                seen += torch.cat([weighed_loss.detach().cpu().reshape(1), shares])
        if config.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def save_model(self, folder: str | Path | None = None) -> None:
        """Write model (or adapter), value head and tokenizer, as Transformers loads them."""
        folder = Path(self.config.output_dir if folder is None else folder)
        self.accelerator.unwrap_model(self.model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - began


def _texts(prompts: Any) -> Sequence[Prompt]:
    """Return the prompts of a data set's column "prompt", or a list as it is."""
    names = getattr(prompts, "column_names", None)
    if names is None:
        return list(prompts)
    if "prompt" not in names:
        raise WhenceError(f"The data set has the columns {', '.join(names)}; a column 'prompt' is needed: rename one.")
    return list(prompts["prompt"])
