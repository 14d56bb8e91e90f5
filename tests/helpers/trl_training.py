"""TRL's trainers on a tiny language model."""

import datasets
from accelerate import PartialState
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from helpers.language_training import PROMPTS, make_model, make_tokenizer, vowels
from whence.llm import ValidationLoss
from whence.llm.trl import InfluenceGRPOTrainer, InfluenceRLOOTrainer

TRAINERS = {
    "grpo": (InfluenceGRPOTrainer, GRPOTrainer, GRPOConfig),
    "rloo": (InfluenceRLOOTrainer, RLOOTrainer, RLOOConfig),
}


def reward(prompts, completions, **columns):
    return [value + 0.1 * len(text) for value, text in zip(vowels(prompts, completions), completions, strict=True)]


class Watch(TrainerCallback):
    """What the parameters and their gradients are before every step of the optimiser."""

    def __init__(self):
        self.states, self.gradients = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **rest):
        self.states.append({name: p.detach().clone() for name, p in model.named_parameters()})
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        self.gradients.append(gradients)


def make_target():
    return ValidationLoss.of([{"prompt": "ab", "completion": "cc"}], make_tokenizer())


def make_config(kind, tmp_path, **more):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "seed": 3,
    }
    return TRAINERS[kind][2](str(tmp_path), **settings | more)


def make_trainer(kind, tmp_path, rule=None, own=True, watch=None, model=None, **more):
    names = ("target", "engine", "memory", "objective", "run", "about", "eval_dataset", "overwrite")
    names += ("select", "refresh_target_every")
    kept = {name: more.pop(name) for name in names if name in more}
    rewards, prompts = more.pop("reward_funcs", reward), more.pop("prompts", PROMPTS * 4)
    more_columns = more.pop("columns", {})
    model, args = model or make_model(), make_config(kind, tmp_path, **more)
    if more.get("beta", kind == "rloo") and not hasattr(model, "peft_config") and not model.config._name_or_path:
        # TRL loads the reference by the model's name; another model makes a divergence that has a gradient.
        with PartialState().main_process_first():  # of several processes only the first writes it
            make_model(seed=1).save_pretrained(tmp_path / "reference")
        model.config._name_or_path = str(tmp_path / "reference")
    return TRAINERS[kind][0 if own else 1](
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts, **more_columns}),
        processing_class=make_tokenizer(),
        callbacks=[watch] if watch else [],
        **({"rule": rule, **kept} if own else {}),
    )


def count_rows(monkeypatch):
    """Return a list, to which each pass of TRL's loss adds the number of its rows."""
    sizes = []
    for trainer_class in (GRPOTrainer, RLOOTrainer):
        compute_loss = trainer_class._compute_loss

        def count(self, model, inputs, compute_loss=compute_loss):
            handle = self.model.register_forward_pre_hook(
                lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
            )
            try:
                return compute_loss(self, model, inputs)
            finally:
                handle.remove()

        monkeypatch.setattr(trainer_class, "_compute_loss", count)
    return sizes
