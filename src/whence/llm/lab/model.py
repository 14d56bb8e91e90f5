"""A small language model, made without a network: tokenizer, weights, imitation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import tqdm

from whence.guards import preserve_rng_state

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
IGNORED = -100
"""The label of tokens that the loss ignores, as in Transformers."""


@dataclass(frozen=True)
class Shape:
    """The size of the network.

    hidden, layers, heads, intermediate: as in `transformers.LlamaConfig`.
    """

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 320


@dataclass(frozen=True)
class Imitation:
    """Supervised training on demonstrations.

    steps: steps of AdamW, over which the learning rate falls to a tenth along a cosine.
    batch_size: demonstrations in each step.
    learning_rate: the highest learning rate, reached after the first twentieth of the steps.
    """

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 2e-3


def make_character_tokenizer(symbols: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; it pads on the left and adds no special token.

    Args:
        symbols: every character that has a token; others become `<unk>`.
    """
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNKNOWN, *symbols))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, shape: Shape, *, positions: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained Llama for a tokenizer; the global generators are unchanged.

    Args:
        tokenizer: the tokenizer of its texts.
        shape: size of the network.
        positions: the longest text in tokens.
        seed: seed of the weights.
    """
    with preserve_rng_state():
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.heads,
                intermediate_size=shape.intermediate,
                max_position_embeddings=positions,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )


def encode_with_labels(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], completions: Sequence[str]
) -> tuple[Int64[Tensor, "n length"], Int64[Tensor, "n length"]]:
    """Return tokens and labels of demonstrations, padded on the right; only completions and their end have labels.

    Args:
        tokenizer: the model's tokenizer.
        prompts: the prompts' texts.
        completions: the texts that the model should write, without an end token.
    """
    questions, answers = (tokenizer(list(texts))["input_ids"] for texts in (prompts, completions))
    length = max(len(question) + len(answer) + 1 for question, answer in zip(questions, answers, strict=True))
    tokens = torch.full((len(questions), length), tokenizer.pad_token_id)
    labels = torch.full_like(tokens, IGNORED)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        ids = torch.tensor([*question, *answer, tokenizer.eos_token_id])
        tokens[row, : len(ids)] = ids
        labels[row, len(question) : len(ids)] = ids[len(question) :]
    return tokens, labels


def imitate(
    model: LlamaForCausalLM,
    tokens: Int64[Tensor, "n length"],
    labels: Int64[Tensor, "n length"],
    imitation: Imitation,
    *,
    generator: torch.Generator,
    progress: bool = False,
) -> list[float]:
    """Train a model on demonstrations in place, and return the loss of every step.

    The same generator gives the same weights on one thread.

    Args:
        model: the model, left in eval mode.
        tokens: tokens of the demonstrations.
        labels: labels from `encode_with_labels`.
        imitation: the settings.
        generator: draws the order of the demonstrations, for every pass.
        progress: show a progress bar.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=imitation.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup_steps = max(imitation.steps // 20, 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(imitation.steps - warmup_steps, 1), eta_min=imitation.learning_rate / 10
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup_steps, total_iters=warmup_steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [warmup_steps])
    losses: list[float] = []
    order = torch.empty(0, dtype=torch.long)
    model.train()
    for _ in tqdm(range(imitation.steps), desc="imitation", disable=not progress):
        if len(order) < imitation.batch_size:
            order = torch.randperm(len(tokens), generator=generator)
        batch, order = order[: imitation.batch_size], order[imitation.batch_size :]
        loss = model(input_ids=tokens[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses
