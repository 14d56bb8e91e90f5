"""The language models of the suite: GPT-2's architecture with random weights, whole or with LoRA's adapters."""

from functools import cache
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import whence
from studies.benchmarks.subjects import MIB, Question, Subject, compute_log_probs
from whence.llm import SequenceReturn, TokenPPO, language_view, make_rows

SHAPES = {"1M": (128, 5, 4), "10M": (320, 8, 5), "100M": (768, 14, 12)}
"""Width, blocks and heads of a model by its parameters."""

VOCABULARY = "0123456789+=;."
PROMPT, RESPONSE = 16, 32

RANK = 16
"""Of LoRA's adapters."""


def write_sums(rows: int, generator: torch.Generator) -> Tensor:
    """Return token ids, (rows, PROMPT + RESPONSE), of sums one after the other: "3+9=12;7+2=9;"."""
    texts = []
    for _ in range(rows):
        text = ""
        while len(text) < PROMPT + RESPONSE:
            a, b = torch.randint(0, 50, (2,), generator=generator).tolist()
            text += f"{a}+{b}={a + b};"
        texts.append([VOCABULARY.index(letter) for letter in text[: PROMPT + RESPONSE]])
    return torch.tensor(texts)


def make_language_model(name: str) -> nn.Module:
    """Return GPT-2's architecture with random weights; of `-lora` its adapters alone train."""
    width, blocks, heads = SHAPES[name.split("-")[1]]
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {"n_positions": PROMPT + RESPONSE, "n_embd": width, "n_layer": blocks, "n_head": heads}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), **shape, **special, **dropout))
    if name.endswith("-lora"):
        adapters = {"r": RANK, "lora_alpha": 2 * RANK, "lora_dropout": 0.0, "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, fan_in_fan_out=True, **adapters))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:  # 0 at first: then no adapter's other half has a gradient
                    parameter.normal_(0, 0.02)
    return model.eval()


class Logits(nn.Module):
    """A language model that takes token ids alone, and returns the logits of the response's tokens, (n, R, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        # Written out for each row: Opacus takes the first axis of every layer for the records'.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        outputs = self.model(input_ids=input_ids, position_ids=positions, use_cache=False)
        return outputs.logits[:, -RESPONSE - 1 : -1]


def make_language_subject(name: str, device: str) -> Subject:
    """Return a language model of the suite on a device; its sums are written, and its log-probs are its own."""
    model = make_language_model(name).to(device)
    view = language_view(model)

    @cache
    def records(n: int) -> whence.RecordBatch:
        generator = torch.Generator().manual_seed(2)
        ids = write_sums(n, generator)
        advantages = torch.randn(n, 1, generator=generator).expand(-1, RESPONSE).contiguous()
        mask = torch.ones(n, RESPONSE, dtype=torch.bool)
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        rows = make_rows(**columns, log_probs=torch.zeros(n, RESPONSE), advantages=advantages).to(device)
        with torch.no_grad():
            parts = [rows.take(slice(start, start + 16)) for start in range(0, n, 16)]
            outputs = [view(view.parameters(), view.prepare(part)).log_prob for part in parts]
        return make_rows(**columns, log_probs=torch.cat(outputs).cpu(), advantages=advantages).to(device)

    def plain(rows: whence.RecordBatch) -> None:
        outputs = view(view.parameters(), view.prepare(rows))
        (outputs.log_prob.mean(1) * rows.advantages).mean().backward()

    def question(n: int) -> Question:
        rows = records(n)
        tokens = rows.observations["advantages"]
        weights, target_weights = tokens / RESPONSE, rows.advantages[:, None].expand(-1, RESPONSE).contiguous()
        ids = rows.observations["input_ids"]
        return Question(Logits(model), (ids,), rows.actions, weights, target_weights, compute_log_probs)

    return Subject(
        name=name,
        policy=view,
        module=model,
        records=records,
        plain=plain,
        chunk=16,
        scoring={"target": SequenceReturn(), "objective": TokenPPO()},
        memory=2048 * MIB,
        question=question,
    )
