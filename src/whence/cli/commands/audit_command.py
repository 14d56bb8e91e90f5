"""`whence audit`."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from whence.cli.terminal import AsJson, RoundBar, options, parse_json, print_json, print_line
from whence.findings import Check
from whence.findings import audit as check_environment
from whence.stored.agents import make_env


def audit(
    env: Annotated[str, typer.Argument(help="An id of Gymnasium's, module:Id, or module:function, of what makes one.")],
    env_kwargs: Annotated[
        str | None, options.optional(help="Arguments of the environment's constructor.", metavar="JSON")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to play at most.", min=100)] = 20_000,
    seconds: Annotated[float, typer.Option(help="Seconds to play at most.", min=1)] = 60.0,
    json: AsJson = False,
) -> None:
    """Check an environment before anything is trained in it: play it for a minute, and say what is wrong or unusual.

    It plays random actions, holds single ones, plays episodes twice, and tries each action from the same states. It
    sees what breaks the contract: a seed that repeats nothing, observations outside their space, an array that a
    later step changes, an end of the wrong type. And what may be meant, but is worth a look: actions that do nothing
    or act late, a reward that never varies, a time limit that looks like an end, a range that a normal policy misses.

    Each line says what was looked at, and what came of it: wrong, unusual, fine, or could not be looked at, because.

    Example: whence audit CartPole-v1

    Example: whence audit my_package.envs:make_env --env-kwargs '{"size": 8}'
    """
    kwargs = parse_json("--env-kwargs", env_kwargs, """'{"map_name": "8x8"}'""", dict) or {}
    with redirect_stdout(sys.stderr), RoundBar("steps", "audit", "step") as bar:  # environments print, too
        make = partial(make_env, env, kwargs, checked=False)
        checks = check_environment(make, steps=steps, seconds=seconds, on_steps=bar.update)
    if json:
        print_json({"env": env, "checks": [asdict(check) for check in checks]})
        return
    print_checks(checks)


def print_checks(checks: Sequence[Check]) -> None:
    """Print what is wrong or unusual, with what to do; then what else was looked at."""
    findings = [check.finding for check in checks if check.finding is not None]
    for number, one in enumerate(findings, start=1):
        print_line(f"{number}. {one.rank.capitalize()}: {one.title}.")
        print_line(f"   {one.evidence}")
        print_line(f"   {one.advice}")
    print_line("What was looked at besides:" if findings else "Nothing is wrong or unusual. What was looked at:")
    for check in checks:
        if check.finding is None:
            print_line(f"   {check.name}: {check.outcome}, {check.text}")
