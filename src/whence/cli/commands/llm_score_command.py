"""`whence llm score`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from whence.cli.terminal import errors, make_printable, print_json, print_line
from whence.cli.terminal.options import AsJson, Overwrite, optional
from whence.core import WhenceError
from whence.llm.rollout_files import NAMES
from whence.llm.rollout_scores import score_rollouts
from whence.stored.language import digest_sources, hide_progress_bars, load_checkpoint, make_scored_target

TARGETS = {
    "sequence": "above 0, training on a row raises the mean advantage-weighted log-probability of the others",
    "token": "above 0, training on a row raises the same token by token",
    "reward": "above 0, training on a row raises the mean reward-weighted log-probability of the others",
    "validation": "above 0, training on a row makes the demonstrations likelier",
}


def score(
    rollouts: Annotated[Path, typer.Argument(help="A file of rollouts that a trainer wrote, or a folder of them.")],
    model: Annotated[
        str, typer.Option(help="The checkpoint to score at: a folder or an id of Transformers, or of a PEFT adapter.")
    ],
    run: Annotated[Path | None, optional(help="The run's directory. (default: runs/NAME of the rollouts)")] = None,
    target: Annotated[
        Literal["sequence", "token", "reward", "validation"],
        typer.Option(help="What a score says is raised: see whence list targets. validation needs --demonstrations."),
    ] = "sequence",
    demonstrations: Annotated[
        str | None, optional(help="Trusted answers: a data set with 'prompt' and 'completion'.")
    ] = None,
    reference: Annotated[
        str | None, optional(help="The checkpoint that the divergence is measured from. (default: none)")
    ] = None,
    beta: Annotated[float, typer.Option(help="Weight of the divergence in the objective, as GRPO's.", min=0.0)] = 0.0,
    max_tokens: Annotated[
        int | None,
        optional(
            help="The most tokens of a response in the training: shorter ones ended, and get an end-of-text token. "
            "(default: all ended)",
            min=1,
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        optional(
            help=f"Where a column has another name: reward=total; a reward may be a sum: 'reward=right + 0.1 * short'. "
            f"Known: {', '.join(NAMES)}.",
            metavar="WHAT=NAME",
        ),
    ] = None,
    self_vote: Annotated[
        bool, typer.Option("--self-vote", help="Leave a row in the mean that scores it; of few rows it decides.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="The sampling temperature of the responses.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Rows of a pass.", min=1)] = 16,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="The model's precision.")
    ] = "float32",
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> None:
    """Score the rollouts that any trainer wrote, at a checkpoint, and make a run of them.

    It reads TRL's completions (log_completions=True), verl's rollouts (trainer.rollout_data_dir), files of ms-swift,
    open-instruct, NeMo-RL, verifiers and prime-rl, and Parquet or JSON lines with a prompt, a response and a reward.
    Each step becomes a round. Of what the files lack, token ids come from the tokenizer and advantages from the rewards
    of each prompt's responses. Rows that cannot be scored are counted. Interrupted, the same command goes on.

    The run is an ordinary one: whence view, report and why work on it.

    Example: whence llm score out/completions --model out/checkpoint-500 --max-tokens 256
    """
    columns = dict(_split(each) for each in column or ())
    folder = run or Path("runs") / (rollouts.stem if rollouts.is_file() else rollouts.resolve().name)
    if (target == "validation") != (demonstrations is not None):
        raise WhenceError("--target validation and --demonstrations go together: the target is their likelihood.")
    with hide_progress_bars(), errors.status("Loading …") as status:
        policy, tokenizer = load_checkpoint(model, dtype)
        directory = score_rollouts(
            *(rollouts, policy, tokenizer, folder),
            target=make_scored_target(target, demonstrations, tokenizer, batch_size),
            reference=None if reference is None else load_checkpoint(reference, dtype)[0],
            beta=beta,
            leave_one_out=None if self_vote else "row",
            columns=columns,
            max_tokens=max_tokens,
            temperature=temperature,
            batch_size=batch_size,
            about={
                **{"model": model, "target_kind": target, "demonstrations": demonstrations, "reference": reference},
                **{"beta": beta, "dtype": dtype, "batch_size": batch_size},
                "contents": digest_sources({"model": model, "demonstrations": demonstrations, "reference": reference}),
            },
            overwrite=overwrite,
            on_round=lambda number, rows: status.update(f"Round {number}: {rows:,} rows scored …"),
        )
    metrics = directory.table("metrics")
    rows = int(metrics["records"].sum())
    if json:
        print_json({"run": str(folder), "target": target, "rounds": len(metrics), "rows": rows})
        return
    print_line(f"{rows:,} rows in {len(metrics)} rounds, {target}: {TARGETS[target]}.")
    print_line(make_printable(f"Run: {folder}   See it: whence view {folder}"))


def _split(text: str) -> tuple[str, str]:
    what, _, name = text.partition("=")
    if what not in NAMES or not name:
        raise WhenceError(f"--column is {text!r}; WHAT=NAME is needed, and WHAT is one of: {', '.join(NAMES)}.")
    return what, name
