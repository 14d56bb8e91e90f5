"""`whence audit`."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from whence.audits import audit as check_environment
from whence.cli.terminal import RoundBar, exit_on_findings, options, parse_json, print_findings, print_json
from whence.stored.agents import make_env


def audit(
    env: Annotated[str, typer.Argument(help="An id of Gymnasium's, module:Id, or module:function, of what makes one.")],
    env_kwargs: Annotated[
        str | None, options.optional(help="Arguments of the environment's constructor.", metavar="JSON")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to play at most.", min=100)] = 20_000,
    seconds: Annotated[float, typer.Option(help="Seconds to play at most.", min=1)] = 60.0,
    json: options.AsJson = False,
    fail_on: options.FailOn = None,
) -> None:
    """Check an environment before anything is trained in it: play it for a minute, and say what is wrong or unusual.

    It plays random actions, holds single ones, plays episodes twice, and tries each action from the same states. It
    sees what breaks the contract: a seed that repeats nothing, observations outside their space, an array that a
    later step changes, an end of the wrong type. And what may be meant, but is worth a look: actions that do nothing
    or act late, a reward that never varies, a time limit that looks like an end, a range that a normal policy misses.

    It prints at most five findings, what is wrong first, each with what was seen and what to do. The last lines say
    what was looked at: what is fine, and what could not be looked at, and why.

    Example: whence audit CartPole-v1 --fail-on wrong

    Example: whence audit my_package.envs:make_env --env-kwargs '{"size": 8}'
    """
    kwargs = parse_json("--env-kwargs", env_kwargs, """'{"map_name": "8x8"}'""", dict) or {}
    with redirect_stdout(sys.stderr), RoundBar("steps", "audit", "step") as bar:  # environments print, too
        make = partial(make_env, env, kwargs, checked=False)
        checks = check_environment(make, steps=steps, seconds=seconds, on_steps=bar.update)
    if json:
        print_json({"env": env, "checks": [asdict(check) for check in checks]})
    else:
        print_findings(checks)
    exit_on_findings(checks, fail_on)
