"""What the commands for agents and for language models share: train a run, compare runs, open a run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from whence import experiments
from whence.cli.console import errors, keep_stdout_clean, print_json, print_line, print_paths, resumable
from whence.cli.progress import ComparisonBars, RoundBar, RunBar
from whence.cli.summary import describe_round, print_comparison
from whence.errors import WhenceError
from whence.experiments import LanguageConfig
from whence.experiments.kinds import AnyConfig
from whence.experiments.shared import OnRound
from whence.page import write_report, write_run_report
from whence.page.explorer.embedding import COMPARED_ROUNDS, spread
from whence.runs import RunDirectory


def train_run(
    config: AnyConfig, path: Path, start: Callable[[OnRound], object], *, on_repeat: str = "goes on from there"
) -> None:
    """Train below a progress bar. On Ctrl-C, say where the rounds so far are.

    Args:
        config: the run.
        path: its directory.
        start: trains, and calls its argument after each round.
        on_repeat: what the same command does after Ctrl-C.
    """
    try:
        with RunBar(config.rounds) as bar:
            start(bar.update)
    except KeyboardInterrupt:
        if any((path / "records").glob("round_*.parquet")):
            done = f"Interrupted after {bar.rounds} of {config.rounds} rounds." if bar.rounds else "Interrupted."
            errors.print(f"{done} The rounds so far are in {path}:", soft_wrap=True)
            errors.print(f"  whence report {path}", highlight=False, soft_wrap=True)
            errors.print(f"The same command {on_repeat}.")
        else:
            errors.print("Interrupted in round 1, so there is nothing to show yet. The same command starts again.")
        raise typer.Exit(130) from None


def show_run(config: AnyConfig, path: Path, *, was_finished: bool, json: bool) -> None:
    """Write the page of a finished run, and print its last round and where its files are."""
    directory, page = RunDirectory.open(path), path / "report.html"
    with RoundBar() as bar:
        write_run_report(directory, page, rounds=spread(directory.rounds(), COMPARED_ROUNDS), on_round=bar.update)
    last_round = directory.table("metrics").to_dicts()[-1]
    evaluations = directory.table("evaluations")
    last_round |= {} if evaluations.is_empty() else evaluations.to_dicts()[-1]
    if json:
        print_json({"run": str(path), "config": config.to_json(), "last_round": last_round})
        return
    done = "was finished already" if was_finished else f"{config.rounds} rounds done"
    words = ", ".join(describe_round(last_round)) or "–"
    print_line(f"{config.env}, {config.arm}, seed {config.seed}: {done}. Last round: {words}")
    model = {"Model": path / "model"} if isinstance(config, LanguageConfig) else {}
    print_paths({"Run": path, **model, "Page": page})


def run_comparison(
    configs: Sequence[AnyConfig], out: Path, *, workers: int | None, overwrite: bool, json: bool, on: str = "local"
) -> None:
    """Run a comparison below progress bars, write its page, and print its result."""
    with resumable(), keep_stdout_clean(), ComparisonBars(configs) as bars:
        comparison = experiments.compare(
            configs, out, workers=workers, overwrite=overwrite, on=on, progress=bars.update
        )
    with RoundBar() as rounds_bar:
        write_report(comparison, out / "report.html", on_round=rounds_bar.update)
    if json:
        print_json(comparison.summary)
        return
    print_comparison(comparison)
    print_paths({"Numbers": out / "summary.json", "Page": out / "report.html"})


def open_agent_run(path: Path) -> RunDirectory:
    """Open the run of an agent, whose policy can be built again.

    Raises:
        RunDirectoryError: there is no run.
        WhenceError: it is a language model's.
    """
    directory = RunDirectory.open(path)
    if directory.config.get("kind") == "language":
        raise WhenceError(
            f"{path} is a language-model run, and this command scores the runs of agents. The scores of its responses "
            f"are in {path / 'records'}; see them with: whence report {path}"
        )
    return directory
