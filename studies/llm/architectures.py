"""Scores of tiny models of many architectures, by every engine, held against plain autograd.

Run: `python -m studies.llm.architectures results/llm [--only gemma]`. Each model has two layers and random weights. Its
pad token is its end token, which is also in every prompt, and embeddings are tied where the architecture ties them.
Rows are padded on the left and on the right. The truth is written out without whence: of each row without its padding,
the gradient of its own term, times the gradient of the target, by `torch.autograd.grad`. It is computed in float32;
for bfloat16 from weights that bfloat16 holds exactly. What is further off in float32 than 1e-5 is computed again in
float64, where rounding goes and a fault stays: first the truth, then the scores. Each model is scored whole, with an
adapter, and as a trainer calls it that tells no positions. An engine that refuses an architecture is no error, a wrong
score is.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import torch
import typer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from studies.shared import Out, report, table, write_page
from whence import RecordBatch, Unsupported, attribute
from whence.engines import ENGINES, Refused, covered_layers, record_training_pass
from whence.llm import SequenceReturn, TokenPPO, language_view, make_rows, score_tokens
from whence.llm.base import EXTRA_PADDING

VOCABULARY, PROMPT, RESPONSE = 24, 5, 4
END = 1
"""The token that ends a response, and pads."""

_GPT = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "n_ctx": 32, "n_inner": 24}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW = {"sliding_window": 4}
_MAMBA = {"state_size": 4, "num_heads": 4, "n_groups": 2, "chunk_size": 4}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_FEW = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR = {f"linear_{name}": size for name, size in [("num_key_heads", 2), ("num_value_heads", 2)]}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neox": {},
    "gpt_bigcode": _GPT,
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32, "expansion_ratio": 2},
    "falcon": {"head_dim": None, "new_decoder_architecture": False},
    "biogpt": {},
    "xglm": {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2},
    "bert-generation": {"is_decoder": True},
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "glm": {},
    "nemotron": {},
    "exaone4": _WINDOW,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "gpt_oss": _EXPERTS | _WINDOW,
    "deepseek_v3": _EXPERTS | _LATENT | _FEW | {"num_key_value_heads": 2, "head_dim": None},
    "qwen3_next": _EXPERTS | _LINEAR,
    "mamba": {"state_size": 4},
    "mamba2": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""What the tiny configuration of an architecture has besides the common settings."""

_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
_COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
_COMMON |= {"pad_token_id": END, "bos_token_id": 2, "eos_token_id": END, "tie_word_embeddings": True}

TARGET, OBJECTIVE = SequenceReturn(), TokenPPO(clip_range=1e9)


class Case(NamedTuple):
    """How a model is scored: with an adapter or whole, told its positions or not, in which precision."""

    adapter: bool
    told: bool
    dtype: torch.dtype


CASES = [
    *(Case(adapter, True, dtype) for dtype in (torch.float32, torch.bfloat16) for adapter in (False, True)),
    Case(False, False, torch.float32),
]


def make_model(name: str, case: Case) -> Any:
    """Return a model with weights large enough to matter; those of bfloat16 are in float32, and hold exactly."""
    settings = {**_COMMON, **ARCHITECTURES[name]}
    config = CONFIG_MAPPING[name](**{key: value for key, value in settings.items() if value is not None})
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    if case.adapter:  # PEFT refuses some layers of Mamba's
        modules = ["in_proj"] if name.startswith("mamba") else "all-linear"
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=modules))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
        parameter.data = parameter.data.to(case.dtype).float()
    return model.eval()


def make_padded_rows(model: Any, case: Case) -> RecordBatch:
    """Return five rows of different lengths, as a policy near the model's would have drawn them."""
    generator = torch.Generator().manual_seed(1)
    prompts, responses = torch.tensor([5, 3, 2, 4, 5]), torch.tensor([4, 2, 4, 1, 3])
    ids = torch.randint(3, VOCABULARY, (5, PROMPT + RESPONSE), generator=generator)
    places = torch.arange(PROMPT + RESPONSE)
    attended = (places >= PROMPT - prompts[:, None]) & (places < PROMPT + responses[:, None])
    ends = (places == PROMPT - 1) | (places == PROMPT + responses[:, None] - 1)
    columns = {"input_ids": torch.where(attended & ~ends, ids, END), "attention_mask": attended.long()}
    columns["response_mask"] = places[:RESPONSE] < responses[:, None]
    old = 0.1 * torch.randn(5, RESPONSE, generator=generator)
    with torch.no_grad():
        for row, mask in enumerate(columns["response_mask"]):
            old[row, mask] += compute_log_probs(model, columns, row, case.told)
    rows = make_rows(**columns, log_probs=old, advantages=torch.randn(5, RESPONSE, generator=generator))
    if case.told:
        return rows
    extra = {EXTRA_PADDING: torch.zeros(5, dtype=torch.long)}
    return rows.with_columns({"observations": {**columns_of(rows), **extra}})


def columns_of(rows: RecordBatch) -> dict[str, Tensor]:
    """Return the columns of tokens."""
    columns: Any = rows.observations
    return columns


def compute_log_probs(model: Any, columns: dict[str, Tensor], row: int, told: bool) -> Tensor:
    """Return the log-probs of a row's response: of the row alone, or as a trainer asks that passes the mask alone."""
    ids, attended = columns["input_ids"][row], columns["attention_mask"][row]
    count, end = int(columns["response_mask"][row].sum()), int(attended.nonzero().max()) + 1
    ids, mask = (ids[attended.bool()], {}) if told else (ids[:end], {"attention_mask": attended[None, :end]})
    logits = model(input_ids=ids[None], use_cache=False, **mask).logits[0].double()
    log_probs: Tensor = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[-count:, 0]
    return log_probs


def score_by_autograd(model: Any, rows: RecordBatch, told: bool) -> Tensor:
    """Return the products of the target's gradient with each row's, by plain autograd."""
    parameters, columns = [p for p in model.parameters() if p.requires_grad], columns_of(rows)

    def differentiate(value: Tensor) -> Tensor:
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.flatten() for gradient in gradients]).double()

    by_row, along = [], torch.zeros(())
    for row, mask in enumerate(columns["response_mask"]):
        log_probs = compute_log_probs(model, columns, row, told)
        old, advantages = (columns[name][row, mask] for name in ("log_probs", "advantages"))
        by_row.append(differentiate(((log_probs - old).exp() * advantages).mean()))
        along = along + differentiate(log_probs.sum() * advantages[-1]) / len(rows)
    return torch.stack(by_row) @ along


def score_in_step(model: Any, rows: RecordBatch) -> Tensor:
    """Return the scores by a recorded step."""
    view = language_view(model)
    parameters: Any = view.parameters()
    layers = covered_layers(dict(model.named_modules()), parameters)
    target = TARGET.from_outputs(view(parameters, view.prepare(rows)), rows)
    gradient = torch.autograd.grad(target, [*parameters.values()], allow_unused=True, materialize_grads=True)
    with record_training_pass(layers, parameters, len(rows)) as step:
        loss = -OBJECTIVE(view(parameters, view.prepare(rows)), rows).sum()
    scores = step.backward(loss, dict(zip(parameters, gradient, strict=True)))
    assert scores is not None
    return scores


def score(model: Any, rows: RecordBatch) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the name of each way that covers the architecture, its scores, and the engine that computed them."""
    for name in ("auto", *ENGINES):
        try:
            influence = attribute(language_view(model), rows, target=TARGET, objective=OBJECTIVE, engine=name)
        except Refused:
            continue
        yield name, influence.scores, influence.engine
    with suppress(Refused):
        yield "in_step", score_in_step(model, rows), "in_step"
    with suppress(Unsupported):
        yield "tokens", score_tokens(model, rows, target=TARGET, objective=OBJECTIVE).sum(1), "forward"


class Measured(NamedTuple):
    """What was seen of a case: the engine that `auto` chose, the ways that answered, and the largest relative errors.

    `rounding` is the error of plain autograd in bfloat16, and in float32 that of the scores where `error` is float64's;
    `bound` is the largest error that it explains.
    """

    engine: str
    ways: list[str]
    error: float
    rounding: float
    bound: float


def measure(name: str, case: Case) -> Measured:
    """Score an architecture by every engine, and compare with plain autograd in float32."""
    model = make_model(name, case)
    rows = make_padded_rows(model, case)
    truth, rounding, bound = score_by_autograd(model, rows, case.told), 0.0, 1e-5

    def compare(*found: Tensor) -> float:
        return max(float((scores.double() - truth).abs().max() / truth.abs().max()) for scores in found)

    if case.dtype != torch.float32:
        model = model.to(case.dtype)
        rounding = compare(score_by_autograd(model, rows, case.told))
        bound = max(3 * rounding, 16 * torch.finfo(case.dtype).eps)
    ways, found, engines = zip(*score(model, rows), strict=True)
    error = compare(*found)
    if case.dtype == torch.float32 and not error <= bound:
        model = to_double(model)
        truth = score_by_autograd(model, rows, case.told)
        error = compare(*found)
        if not error <= bound:
            rounding, error = error, compare(*(scores for _, scores, _ in score(model, rows)))
    return Measured(engines[0], list(ways), error, rounding, bound)


def to_double(model: Any) -> Any:
    """Return the model in float64, with experts one by one, since their kernel has no float64."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    return model.double()


def main(
    out: Out,
    only: Annotated[str, typer.Option(help="Architectures whose name begins so.")] = "",
) -> None:
    """Measure the architectures, and write architectures.md."""
    torch.set_num_threads(1)
    lines = [["architecture", "engine", "with an adapter", "in the step", "float32", "bfloat16", "its rounding"]]
    wrong = []
    for name in (name for name in ARCHITECTURES if name.startswith(only)):
        report(name)
        measured = {case: measure(name, case) for case in CASES}
        wrong += [(name, case, each) for case, each in measured.items() if not each.error <= each.bound]
        single = [each for case, each in measured.items() if case.dtype == torch.float32]
        half = [each for case, each in measured.items() if case.dtype != torch.float32]
        in_step = ["in_step" in each.ways for each in single]
        engines = ["/".join(dict.fromkeys((one.engine, other.engine))) for one, other in [(single[0], single[2])]]
        errors = [max(max(each.error, each.rounding) for each in single), max(each.error for each in half)]
        shown = [f"{error:.0e}" for error in (*errors, max(each.rounding for each in half))]
        share = "yes" if all(in_step) else "with an adapter" if in_step[1] else "no"
        lines.append([name, *engines, single[1].engine, share, *shown])
    write_page(out / "architectures.md", "# Architectures", table(lines))
    for each in wrong:
        report("wrong:", *each)
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
