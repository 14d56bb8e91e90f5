"""What scores of language models cost by fewer layers and in bfloat16, and how well they rank rows as all layers do.

Run: `python -m studies.scoring.cheap_scores results/scoring [--sizes 1M,10M,100M] [--rows 64] [--device cuda]`. Each
model (GPT-2's architecture, random weights) is trained for `--steps` steps to write sums out, draws a response to each
prompt, and its rows are scored by `SequenceReturn` with random rewards' advantages. Compared are, one after the other
in one process, CPU seconds (on a GPU those of the clock) of

- scoring: by all layers, and by the last 1, 2, 4 blocks; each in passes of 16 rows, in one pass, in bfloat16, and in
  one pass in bfloat16 ("both"). The stored results had kept hidden states to begin the last blocks' passes at, which
  have left the package since; "own pass" is without them;
- optimisation: one epoch on all rows, with minibatches of 16 and of 64.

The share is scoring divided by one epoch, or by four. The agreement is Spearman's with the scores by all layers. One
torch thread; medians of `--repeats`, with the lowest and the highest. A first run of each is not counted. What is
measured is written at once, and not measured again.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from studies.benchmarks.timing import check_device, count_seconds
from studies.markdown import table
from whence import KeepAll
from whence.checks import list_last_blocks, rank_agreement
from whence.guards import write_atomically
from whence.llm import SequenceReturn, TokenPPO, language_view, make_rows
from whence.llm.base.ppo_config import PPOConfig
from whence.llm.base.processes import Processes
from whence.llm.base.value_head import WithValueHead
from whence.llm.ppo.optimisation import make_optimizer, optimise
from whence.llm.scores.row_scores import Scoring, score
from whence.records import RecordBatch

SHAPES: Mapping[str, tuple[int, int, int]] = {"1M": (128, 5, 4), "10M": (320, 8, 5), "100M": (768, 14, 12)}
"""Width, blocks and heads of a model by its parameters."""

VOCABULARY = "0123456789+=;."
PROMPT, RESPONSE = 16, 32

VARIANTS = (("", 16, False), (", one pass", None, False), (", bfloat16", 16, True), (", both", None, True))
"""What is added to the name of a score, its rows in a pass (None: all), and whether it is in bfloat16."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a stage, on a GPU those of the clock: the median, the lowest and the highest."""

    median: float
    low: float
    high: float


def measure(run: Callable[[], Any], repeats: int, device: str) -> Cost:
    """Return what a stage costs, once it was run."""
    seconds = [count_seconds(run, device) for _ in range(repeats)]
    return Cost(statistics.median(seconds), min(seconds), max(seconds))


def make_model(size: str) -> WithValueHead:
    """Return a model with random weights and a value head."""
    width, blocks, heads = SHAPES[size]
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = GPT2Config(
        vocab_size=len(VOCABULARY), n_positions=PROMPT + RESPONSE, n_embd=width, n_layer=blocks, n_head=heads, **special
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return WithValueHead(GPT2LMHeadModel(config))


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


def train_on_sums(model: WithValueHead, steps: int) -> float:
    """Train a model to write sums, and return its last loss, in nats a token."""
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.Adam(model.parameters(), lr=3e-4)
    loss = torch.zeros(())
    for _ in range(steps):
        ids = write_sums(16, generator).to(find_device(model))
        loss = model.language_model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def find_device(model: WithValueHead) -> torch.device:
    """Return where a model is."""
    return next(model.parameters()).device


def draw_rows(model: WithValueHead, count: int) -> RecordBatch:
    """Return rows of sampled responses on the model's device, with random rewards as the advantages of their tokens."""
    generator, device = torch.Generator().manual_seed(2), find_device(model)
    ids = write_sums(count, generator)[:, :PROMPT]
    with torch.no_grad():
        for _ in range(RESPONSE):
            logits = model.language_model(input_ids=ids.to(device)).logits[:, -1].cpu()
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    advantages = torch.randn(count, 1, generator=generator).expand(-1, RESPONSE).contiguous()
    mask, zeros = torch.ones(count, RESPONSE, dtype=torch.bool), torch.zeros(count, RESPONSE)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    draft = make_rows(**columns, log_probs=zeros, advantages=advantages)
    view = language_view(model)
    with torch.no_grad():
        outputs = view(view.parameters(), view.prepare(draft))
    values = outputs.value.detach().cpu()
    return make_rows(
        **columns,
        log_probs=outputs.log_prob.detach().cpu(),
        advantages=advantages,
        values=values,
        returns=values + advantages,
    ).to(device)


def list_scores(
    model: WithValueHead, batch: RecordBatch, device: str
) -> Iterator[tuple[str, Callable[[], Float[Tensor, " n"]]]]:
    """Yield the name of each way of scoring, the full one first, and what computes its scores."""
    whole = Scoring(SequenceReturn(), TokenPPO(), 1.0, "ghost", None, 16)

    def prepare(how: Scoring, autocast: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                return score(model, batch, how).scores.double()

        return run

    for layers in (None, *list_last_blocks(model)):
        name, how = ("all", whole) if layers is None else (f"last {layers}", replace(whole, layers=layers))
        for kind, chunk_size, autocast in VARIANTS:
            yield f"{name}{kind}", prepare(replace(how, chunk_size=chunk_size or len(batch)), autocast)


def measure_size(
    size: str, about: Mapping[str, Any], before: Mapping[str, Any], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield the costs and agreements of a model, again after each score that an earlier result lacks."""
    device = about["device"]
    model = make_model(size).to(device)
    loss = train_on_sums(model, about["steps"])
    model.eval()
    batch = draw_rows(model, about["rows"])
    result = {
        "size": size,
        **about,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "blocks": SHAPES[size][1],
        "loss": loss,
        "epoch": before.get("epoch")
        or {str(rows): vars(_measure_epoch(model, batch, rows, repeats, device)) for rows in (16, 64)},
    }
    _, score_fully = next(list_scores(model, batch, device))
    full = score_fully()
    lines = {line["scores"]: line for line in before.get("scores", ())}
    for name, run in list_scores(model, batch, device):
        if name not in lines:
            agreement = rank_agreement(run(), full)
            seconds = {**vars(measure(run, repeats, device)), "repeats": repeats}
            lines[name] = {"scores": name, "seconds": seconds, "spearman": agreement}
            yield {**result, "scores": list(lines.values())}


def _measure_epoch(model: WithValueHead, rows: RecordBatch, batch_size: int, repeats: int, device: str) -> Cost:
    """Return what an epoch of optimisation costs; its learning rate is 0, so that the model stays as it is."""
    config = PPOConfig("none", mini_batch_size=batch_size, batch_size=len(rows), ppo_epochs=1, learning_rate=0.0)
    accelerator, optimizer = Accelerator(cpu=device == "cpu"), make_optimizer(model, config)

    def run() -> None:
        optimise(
            model,
            optimizer,
            rows,
            KeepAll().select(rows),
            config=config,
            generator=torch.Generator().manual_seed(0),
            accelerator=accelerator,
            processes=Processes(accelerator),
        )

    run()
    return measure(run, repeats, device)


def tabulate(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the shares and agreements as a table."""
    head = ["model", "scores", "CPU s", "of one epoch, 16 / 64", "of four epochs, 16 / 64", "Spearman"]
    lines = []
    for result in results:
        epochs = [result["epoch"][size]["median"] for size in ("16", "64")]
        for entry in result["scores"]:
            seconds = entry["seconds"]
            shares = [" / ".join(f"{seconds['median'] / (n * epoch):.0%}" for epoch in epochs) for n in (1, 4)]
            cost = f"{seconds['median']:.3g} [{seconds['low']:.3g}, {seconds['high']:.3g}]"
            lines.append([result["size"], entry["scores"], cost, *shares, f"{entry['spearman']:.3f}"])
    return table([head, *lines])


def write_results(out: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write language.json and language.md."""
    with write_atomically(out / "language.json") as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    with write_atomically(out / "language.md") as temporary:
        temporary.write_text(f"# Scores of language models\n\n{tabulate(results)}\n", encoding="utf-8")


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/scoring"),
    sizes: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = ",".join(SHAPES),
    rows: Annotated[int, typer.Option(help="Responses.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps of training before.")] = 300,
    repeats: Annotated[int, typer.Option(help="Repeats of each measurement.")] = 5,
    device: Annotated[str, typer.Option(help="Where it is computed: cpu or cuda.")] = "cpu",
) -> None:
    """Measure what is not in language.json, and write it and language.md."""
    torch.set_num_threads(1)
    check_device(device)
    path = out / "language.json"
    results = {result["size"]: result for result in json.loads(path.read_text())} if path.exists() else {}
    about = {"rows": rows, "steps": steps, "device": device}
    for size in sizes.split(","):
        before = results.get(size, {})
        same = all(before.get(name) == value for name, value in about.items())
        for result in measure_size(size, about, before if same else {}, repeats):
            results[size] = result
            write_results(out, [results[name] for name in SHAPES if name in results])
        print(tabulate([results[size]]), flush=True)


if __name__ == "__main__":
    typer.run(main)
