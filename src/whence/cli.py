"""The command `whence`."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from whence.errors import Unsupported, WhenceError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from typer.core import TyperGroup
except ImportError as missing:
    raise Unsupported("The command `whence` needs its extra: pip install 'whence[cli]'.") from missing

from whence import experiments
from whence.report.page import METRICS, READING, cell, column_heading, write_report

console = Console()
errors = Console(stderr=True)


class _Commands(TyperGroup):
    """Typer's own answer to Ctrl-C says nothing of what is kept."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("Interrupted. Finished runs are kept; the same command goes on from there.", soft_wrap=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Which records of a rollout helped the policy, which harmed it; and training on the right ones.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _commands() -> None:
    """Keep `compare` a subcommand while it is the only one."""


def _presets() -> str:
    return ", ".join(experiments.presets())


def _arms() -> str:
    return "; ".join(f"{name}: {arm.about}" for name, arm in experiments.ARMS.items())


@app.command()
def compare(
    env: Annotated[
        str | None, typer.Argument(help="A Gymnasium environment, such as LunarLander-v3, trained with SB3's defaults.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"A built-in set-up instead of ENV. Known: {_presets()}.")] = None,
    arms: Annotated[str, typer.Option(help=f"Ways to train, separated by commas. {_arms()}.")] = "ppo,iif,random",
    seeds: Annotated[int, typer.Option(help="Runs per arm, with seeds 0, 1, ...")] = 3,
    rounds: Annotated[int | None, typer.Option(help="Rollouts to train on. (default: the preset's, or 50)")] = None,
    drop: Annotated[
        float | None,
        typer.Option(help="Share of the records that score below 0 to drop. (default: the preset's, or 0.5)"),
    ] = None,
    eval_episodes: Annotated[
        int | None, typer.Option(help="Episodes of each evaluation. (default: the preset's, or 100)")
    ] = None,
    n_envs: Annotated[int | None, typer.Option(help="Environments stepped side by side. (default: 1)")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time. (default: one per core)")] = None,
    out: Annotated[Path, typer.Option(help="Directory for summary.json, report.html and the runs.")] = Path(
        "out/compare"
    ),
) -> None:
    """Train each arm on each seed, and tell how many rounds and how much time it saves beside plain PPO.

    Interrupted, the same command goes on where it was. Evaluation samples actions, after every round.

    Example: whence compare --preset lda-code/frozenlake --arms ppo,iif,random --seeds 3
    """
    names = [name.strip() for name in arms.split(",") if name.strip()]
    overrides: dict[str, Any] = {"rounds": rounds, "drop": drop, "eval_episodes": eval_episodes, "n_envs": n_envs}
    configs = experiments.plan(env=env, preset=preset, arms=names, seeds=seeds, **overrides)
    with _Bars(configs) as bars:
        comparison = experiments.compare(configs, out, workers=workers, progress=bars.update)
    write_report(comparison, out / "report.html")
    ((name, summary),) = comparison.summary.items()
    console.print(_table(f"{name}, {seeds} seeds, {configs[0].rounds} rounds", summary))
    console.print(READING, style="dim")
    for name, file in (("Numbers", "summary.json"), ("Page", "report.html")):
        console.print(f"{name}: {out / file}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, summary: Mapping[str, Any]) -> Table:
    table = Table(title=escape(title))
    table.add_column("metric")
    for arm in summary:
        table.add_column(column_heading(arm), justify="right")
    for metric, heading in METRICS.items():
        table.add_row(heading, *(" ".join(cell(metric, entry[metric])).strip() for entry in summary.values()))
    return table


class _Bars:
    """A bar for all rounds and one for each run under way; plain lines where there is no terminal."""

    def __init__(self, configs: list[experiments.RunConfig]) -> None:
        self._total = sum(config.rounds for config in configs)
        self._done: dict[tuple[str, int], int] = {}
        self._bars: dict[tuple[str, int], TaskID] = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=errors, disable=not errors.is_terminal)
        self._all = self._progress.add_task("all rounds", total=self._total)

    def __enter__(self) -> "_Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, config: experiments.RunConfig, rounds: int) -> None:
        key = config.arm, config.seed
        self._done[key] = rounds
        self._progress.update(self._all, completed=sum(self._done.values()))
        if 0 < rounds < config.rounds and key not in self._bars:
            self._bars[key] = self._progress.add_task(f"  {config.arm}, seed {config.seed}", total=config.rounds)
        if key in self._bars:
            self._progress.update(self._bars[key], completed=rounds, visible=rounds < config.rounds)
        if not errors.is_terminal and rounds == config.rounds:
            errors.print(f"{config.arm}, seed {config.seed}: {rounds} rounds done")


def main() -> None:
    """Run the command; errors that whence raises are shown without a traceback."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so that workers end too
    try:
        app()
    except WhenceError as error:
        errors.print(f"[bold red]Error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
