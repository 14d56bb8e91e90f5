"""`whence findings`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import errors, exit_on_findings, options, print_findings, print_json
from whence.findings import choose_findings, inspect, open_run_or_logs
from whence.runs import RunDirectory


def findings(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not; or logs of another library.")],
    json: options.AsJson = False,
    fail_on: options.FailOn = None,
) -> None:
    """Say what is wrong with a run, or unusual: at most five findings, what is wrong first, each with what to do.

    A finding names what, where and how much. "Wrong" is far beyond what any healthy run of the reference environments
    shows, "unusual" beyond it. Below it stand what was compared, what to do, and records to open. The last lines say
    what was looked at: what is fine, and what could not be looked at, and why. Where nothing stands out, that is no
    proof that all is well. Of a language model's run it looks at the reward functions, of which one may rise while
    another falls or stays low, and at whether the model collapses.

    It takes seconds: it reads up to 40,000 records and the metrics of all rounds, and plays nothing.

    In place of a run it reads logs of SB3, CleanRL, rsl_rl, TRL, verl or OpenRLHF, or a folder of one training's:
    TensorBoard's files, progress.csv, monitor.csv, evaluations.npz, trainer_state.json, other CSV or JSON lines.

    Example: whence findings runs/lander

    Example: whence findings runs/lander --json --fail-on wrong
    """
    directory = open_run_or_logs(run)
    not_read = [] if isinstance(directory, RunDirectory) else list(directory.not_read)
    if isinstance(directory, RunDirectory):
        directory.require_rounds()
    with errors.status("Looking for what stands out …"):
        checks = inspect(directory)
    if json:
        checked = [{"name": one.name, "outcome": one.outcome, "text": one.text} for one in checks]
        listed = [asdict(one) for one in choose_findings(checks)]
        print_json({"run": str(run), "findings": listed, "checks": checked, "not_read": not_read})
    else:
        print_findings(checks, not_read)
    exit_on_findings(checks, fail_on)
