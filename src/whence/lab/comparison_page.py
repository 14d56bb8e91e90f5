"""The page of a comparison: its verdicts and table, and the runs of its first seed."""

from collections.abc import Sequence
from pathlib import Path

from whence.lab.arms import STANDARD
from whence.lab.comparison import Comparison
from whence.lab.tables import COMPARISON_DEFINITIONS, make_summary
from whence.page import (
    COMPARED_ROUNDS,
    ExploredRun,
    OnRound,
    Runs,
    arm_colours,
    choose_rounds,
    count,
    list_facts,
    render,
    write_page,
)
from whence.stored.agents import AnyEnv
from whence.stored.language import LanguageConfig


def write_comparison(
    comparison: Comparison,
    path: Path,
    *,
    env: AnyEnv = None,
    rounds: Sequence[int] | None = None,
    on_round: OnRound | None = None,
) -> None:
    """Write the page of a finished comparison, atomically.

    Args:
        comparison: the comparison.
        path: the file.
        env: the environment, for frames; None: the runs' own.
        rounds: those of the first seed's runs to embed; None: at most 12 of each run, evenly spread.
        on_round: called after each embedded round with the number of those that are done, and of all.
    """
    ((env_name, arms),) = comparison.summary.items()
    first, seeds = comparison.configs[0], sorted({config.seed for config in comparison.configs})
    configs = sorted(comparison.configs, key=lambda config: (list(arms).index(config.arm), config.seed))
    runs: Runs = {(config.arm, config.seed): comparison.run(config) for config in configs}
    summary, colours = make_summary(comparison), arm_colours(arms, STANDARD)
    shared = {name: value for name, value in first.to_json().items() if name not in ("arm", "seed")}
    # The rounds of all seeds would make the file heavy.
    explored = [ExploredRun(run, f"{arm}, seed {seed}", env) for (arm, seed), run in runs.items() if seed == seeds[0]]
    chosen = [choose_rounds(run, rounds, COMPARED_ROUNDS) for run in explored]
    notes: list[str] = []
    if any(len(numbers) < len(run.directory.rounds()) for run, numbers in zip(explored, chosen, strict=True)):
        notes.append(
            f"This file holds {len(chosen[0])} rounds of each run of the first seed. The command "
            f"`whence view {comparison.path}` shows all of them."
        )
    evaluation = (
        f"up to {count(first.test_problems, 'prompt')} of the test"
        if isinstance(first, LanguageConfig)
        else f"{count(first.eval_episodes, 'evaluation episode')} after each round"
    )
    page = render(
        runs,
        explored,
        colours,
        notes,
        title=f"{env_name}: {', '.join(arms)}",
        subtitle=f"{count(len(seeds), 'seed')}, {count(first.rounds, 'round')}, {evaluation}.",
        summary=summary,
        headings=zip(summary.headings, colours.values(), strict=True),
        definitions=COMPARISON_DEFINITIONS,
        rounds=chosen,
        facts=list_facts({**shared, "arms": ", ".join(arms), "seeds": ", ".join(map(str, seeds))}, runs.values()),
        on_round=on_round,
    )
    write_page(path, page)
