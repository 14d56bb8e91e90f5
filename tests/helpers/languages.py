"""Tiny language models and rows for the tests; no network."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import whence
from whence import RecordBatch
from whence.llm import SequenceReturn, TokenPPO, language_view, make_rows

VOCABULARY = 50
STYLES = ("gpt2", "gpt_neo", "llama", "qwen2", "qwen3")
_ADAPTED = {"gpt2": ["c_attn", "c_fc"], "gpt_neo": ["q_proj", "v_proj", "c_fc"]}


def language_model(
    style: str = "gpt2", *, attention: str = "sdpa", lora: float | None = None, vocabulary: int = VOCABULARY
) -> Any:
    """Return a model of two layers with weights large enough to matter; `lora` is the dropout of an adapter."""
    common: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    common["attn_implementation"] = attention
    if style == "gpt2":
        common |= {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}
        model: Any = GPT2LMHeadModel(GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common))
    elif style == "gpt_neo":  # without fused attention; every other layer sees the last few tokens alone
        common |= {"attn_implementation": "eager", "num_layers": 2, "hidden_size": 16, "num_heads": 2}
        common |= {"attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 32}
        model = GPTNeoForCausalLM(GPTNeoConfig(intermediate_size=24, **common))
    else:
        common |= {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
        common |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        if style == "llama":
            model = LlamaForCausalLM(LlamaConfig(**common))
        elif style in ("biogpt", "opt"):  # positions by columns and by tokens, where none are told
            model = BioGptForCausalLM(BioGptConfig(**common))
            if style == "opt":
                model = OPTForCausalLM(OPTConfig(ffn_dim=24, word_embed_proj_dim=16, **common))
        elif style == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **common))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **common))
    if lora is not None:
        adapted = _ADAPTED.get(style, ["q_proj", "v_proj", "down_proj"])
        settings = {"lora_alpha": 4, "lora_dropout": lora, "fan_in_fan_out": style == "gpt2"}
        model = get_peft_model(model, LoraConfig(r=2, target_modules=adapted, **settings))
    return shaken(model)


def shaken(model: nn.Module) -> nn.Module:
    """Draw all weights anew: norms near 1, and nothing zero, as an adapter or a value head begins."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.3)
    return model


def tokens(n: int = 6, prompt: int = 5, response: int = 4, *, empty: bool = True) -> dict[str, Tensor]:
    """Return prompts padded on the left and responses padded on the right; the last row's response may be empty."""
    ids = torch.randint(2, VOCABULARY, (n, prompt + response))
    of_prompt, of_response = torch.randint(1, prompt + 1, (n,)), torch.randint(1, response + 1, (n,))
    of_prompt[0], of_response[0] = prompt, response
    if empty:
        of_response[-1] = 0
    places = torch.arange(prompt + response)
    attended = (places >= prompt - of_prompt[:, None]) & (places < prompt + of_response[:, None])
    mask = torch.arange(response) < of_response[:, None]
    return {"input_ids": ids * attended, "attention_mask": attended.long(), "response_mask": mask}


def rows_for(model: nn.Module, given: dict[str, Tensor] | None = None, *, spread: float = 0.3) -> whence.RecordBatch:
    """Return rows as a policy near the model's would have drawn them: ratios away from 1, some of them clipped."""
    given = tokens() if given is None else given
    zeros = torch.zeros(given["response_mask"].shape)
    draft = make_rows(**given, log_probs=zeros, advantages=zeros)
    view = language_view(model)
    with torch.no_grad(), whence.core.eval_mode(model.modules()):
        log_probs = view(view.parameters(), view.prepare(draft)).log_prob
    drawn = {name: torch.randn_like(zeros) for name in ("values", "returns", "advantages")}
    return make_rows(**given, log_probs=log_probs + spread * torch.randn_like(zeros), **drawn)


def scored(model: nn.Module, rows: RecordBatch, **more: Any) -> Any:
    """Return the rows' scores by PPO's objective and the return of whole responses, unless `more` says otherwise."""
    settings = {"target": SequenceReturn(), "objective": TokenPPO(), **more}
    return whence.attribute(language_view(model), rows, **settings)


def alone(model: nn.Module, rows: RecordBatch, row: int) -> tuple[Tensor, slice]:
    """The log-probs of a row's response without padding, mask or position ids; and where its numbers lie."""
    observations = rows.observations
    own = observations["input_ids"][row][observations["attention_mask"][row].bool()]
    count = int(observations["response_mask"][row].sum())
    log_probs = model(own[None]).logits[0].log_softmax(-1)
    after = own[1:, None]
    return log_probs[:-1].gather(1, after)[:, 0][len(own) - 1 - count :], slice(0, count)
