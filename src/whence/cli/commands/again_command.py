"""`whence again`."""

import json as json_library
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from whence import causes
from whence.cli.terminal import console, errors, make_table, options, print_json, print_line, resumable
from whence.core import WhenceError
from whence.runs import RunDirectory


def again(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    start: Annotated[
        int | None,
        options.optional("--from", help="The round to continue after. (default: a checkpoint before the return fell)"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Other seeds; each is a training of every variant.", min=1)] = 8,
    rounds: Annotated[int | None, options.optional(help="Rounds of a training. (default: to the run's end)")] = None,
    changes: Annotated[
        list[str] | None,
        options.optional(
            "--set", help="A setting to change, such as learning_rate=1e-4; each alone.", metavar="NAME=VALUE"
        ),
    ] = None,
    without: Annotated[
        str | None,
        options.optional(help=f"Leave out the records for which this holds: {causes.EXAMPLE}.", metavar="SQL"),
    ] = None,
    trust: options.Trust = False,
    json: options.AsJson = False,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
) -> None:
    """See whether a return that fell falls again: continue the training from before it with other seeds.

    It counts in how many seeds the return falls as it did in the run, unchanged and with one thing changed at a time.
    If nearly all break, a setting is the cause, and a change that prevents it is a cure. If few do, it was chance.

    Settings are SB3's, such as learning_rate, clip_range, max_grad_norm, n_epochs, target_kl or ent_coef. Records that
    are left out are compared with as many others, drawn at random in each round. Interrupted, the same command
    continues.

    Example: whence again runs/lander --set learning_rate=1e-4 --set max_grad_norm=0.1

    Example: whence again runs/lander --from 30 --rounds 12 --without "abs(reward) > 100"
    """
    directory = RunDirectory.open(run, trust=trust)
    torch.set_num_threads(1)
    with resumable(), errors.status("reading") as status:
        repetition = causes.repeat(
            directory,
            start,
            seeds=seeds,
            rounds=rounds,
            changes=dict(map(_read_change, changes or [])),
            without=without,
            env=env,
            on_stage=status.update,
        )
    _print_repetition(repetition, run, json=json)


def _read_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name.strip(), json_library.loads(value)
    except ValueError:
        pass
    raise WhenceError(f"--set is {text!r}; a name and a number are needed, such as learning_rate=1e-4.")


def _print_repetition(repetition: causes.Repetition, run: Path, *, json: bool) -> None:
    rows = repetition.summarise()
    if json:
        about = {"run": str(run), "text": repetition.text, "start": repetition.start, "rounds": repetition.rounds}
        print_json(about | {"variants": rows, "notes": list(repetition.notes)})
        return
    cells = [
        [
            row["variant"],
            f"{row['broke']} of {row['of']}",
            f"{row['low']:.0%} to {row['high']:.0%}",
            "–" if row["change_low"] is None else f"{row['change_low']:+.0%} to {row['change_high']:+.0%}",
            "–" if row["return"]["mean"] is None else f"{row['return']['mean']:.4g}",
        ]
        for row in rows
    ]
    title = f"After round {repetition.start}, {repetition.rounds} rounds, 95% intervals"
    heads = ["trained", "broke", "share", "change", "last return"]
    console.print(make_table(title, heads, [[cell.replace("-", "−") for cell in row] for row in cells]))
    print_line(repetition.text)
    for note in repetition.notes:
        print_line(f"Note: {note}")
    print_line(f"Numbers: {repetition.file}")
