"""Whether a planted cause is proved: a training without the records that a finder names, or without the rigged ones.

Run: `python -m studies.planted.proofs results/planted [--only arithmetic/finder]`. The runs are those of seed 0 of
`studies.planted.run` and `studies.planted.language`, which are trained if they are not there. In each, `whence prove`
trains the first rounds again: "finder" leaves out what a finder names for the tic, "truth" what got the rigged reward,
"raw" what `nearest` would name with advantages as stored, "activations" what "activations, same action" names.

"plain" is LunarLander without the plant. There, nothing has paid for the records of "truth", firings of the left engine
in the lower half in a tenth of the episodes; but they are all of one action, and what they taught about it is left out
with them. The records of "episodes", all of that tenth, are nothing special.

A finished training is not done again: the command goes on where it was interrupted. Runs are kept in `--runs`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
import typer

from studies.planted import grader, language
from studies.planted import run as agents
from studies.planted.judging import Floats, is_apart_by_means, score_by_raw
from studies.shared import Only, Out, Runs, read_list, report, table, write_line, write_page
from whence.causes import AgentTraining, Examples, Proof, find_causes, prove
from whence.causes.retraining import VARIANTS
from whence.causes.verdicts import list_changes
from whence.core import Action
from whence.lab.language import training as language_training
from whence.runs import RunDirectory

KEYS = ("case", "left_out", "outcome", "variant", "seed")
"""What names a line of proofs.parquet."""

SEEDS = 5


class Setup(NamedTuple):
    """A world whose tic is proved: its first rounds, which are trained again, the finder, and how many it names."""

    rounds: int
    method: str
    top: int


SETUPS = {
    "arithmetic": Setup(6, "bm25", 128),
    "lander": Setup(10, "nearest", 256),
    "minigrid": Setup(10, "nearest", 256),
    "plain": Setup(5, "nearest", 256),
}

agents.CASES["plain"] = agents.CASES["lander"]._replace(env="LunarLander-v3", rounds=SETUPS["plain"].rounds)

JOBS = [(case, what) for case in SETUPS if case != "plain" for what in ("finder", "truth")]
JOBS += [("plain", "truth"), ("plain", "episodes"), ("lander", "raw"), ("minigrid", "raw")]
JOBS += [("lander", "activations"), ("minigrid", "activations")]
"""The worlds, and what is left out in them."""


def read_numbered(directory: RunDirectory) -> pl.DataFrame:
    """Return the records of all rounds, in order, with the column `round`."""
    tables = ((number, directory.round("records", number)) for number in directory.rounds())
    numbered = (table.with_columns(pl.lit(number, dtype=pl.Int64).alias("round")) for number, table in tables)
    return pl.concat(numbered, how="diagonal_relaxed")


def list_rigged(case: str, directory: RunDirectory, rounds: int, *, whole: bool = False) -> pl.DataFrame:
    """Return `round` and `record_id` of what got the rigged reward, or would have got it, in the first rounds.

    Of the lander these are records, or whole episodes.
    """
    # An episode's beginning, which tells whether it is rigged, may be in the round before.
    records = read_numbered(directory).filter(pl.col("round") <= rounds)
    rigged = language.find_rigged(records) if case == "arithmetic" else agents.find_rigged(case, records)
    chosen = records.filter(pl.Series(rigged))
    if whole:
        chosen = records.filter(pl.col("episode_id").is_in(chosen["episode_id"].to_list()))
    return chosen.select("round", "record_id")


def name_top(records: pl.DataFrame, scores: Floats, top: int) -> pl.DataFrame:
    """Return `round` and `record_id` of the records that score highest."""
    return records.with_columns(score=scores).sort("score", descending=True).head(top).select("round", "record_id")


def prove_text(what: str, runs: Path, on_stage: Callable[[str], None]) -> Proof:
    """Prove what taught the wrong answer to a problem of the kind that the bug pays."""
    lab, path, setup = grader.make_lab(), runs / "arithmetic" / "seed_0", SETUPS["arithmetic"]
    language_training.run(language.configure_run(lab, 0), path)
    directory, question = RunDirectory.open(path), language.list_questions(lab)[0]
    return prove(
        directory,
        Examples(*question),
        None if what == "finder" else list_rigged("arithmetic", directory, setup.rounds),
        method=setup.method,
        top=setup.top,
        rounds=range(1, setup.rounds + 1),
        seeds=SEEDS,
        on_stage=on_stage,
    )


def prove_tic(case: str, what: str, runs: Path, on_stage: Callable[[str], None]) -> Proof:
    """Prove what taught the tic, in states of the trained policy's rollouts in which it would pay."""
    setup, planted = SETUPS[case], "lander" if case == "plain" else case
    world = agents.CASES[planted]
    directory = agents.train(agents.CASES[case], 0, runs / case / "seed_0")
    visits = agents.visit_region(agents.train(world, 0, runs / planted / "seed_0"), 0)
    target = Action(visits.states, np.full(len(visits.states), world.action))
    if what == "raw":
        causes = find_causes(directory, target, rounds=range(1, setup.rounds + 1), method=setup.method)
        left_out = name_top(causes, score_by_raw(causes), setup.top)
    elif what == "activations":
        records = read_numbered(directory)
        scores = agents.score("activations, same action", directory, records, visits, world.action)
        is_first = records["round"] <= setup.rounds
        left_out = name_top(records.filter(is_first), scores[is_first.to_numpy()], setup.top)
    else:
        left_out = list_rigged(planted, directory, setup.rounds, whole=what == "episodes")
    return prove(
        directory,
        target,
        None if what == "finder" else left_out,
        words="the tic",
        method=setup.method,
        top=setup.top,
        rounds=range(1, setup.rounds + 1),
        seeds=SEEDS,
        training=AgentTraining(test_episodes=0 if case == "plain" else 20),
        on_stage=on_stage,
    )


def write_tables(out: Path) -> None:
    """Write proofs.md: means over seeds, and changes from training on all, with 95% t intervals, and the verdicts.

    "before" says whether the rule of `is_apart_by_means` would see a difference in the same trainings.
    """
    rows = pl.DataFrame(read_list(out / "proofs.parquet", KEYS))
    titles = ("without them", "without random", "without a placebo's", "verdict", "before")
    lines = [["world", "left out", "records", "outcome", "the run", "with all", *titles]]
    for (case, what), part in rows.group_by("case", "left_out", maintain_order=True):
        stored = dict(part.filter(variant="run").select("outcome", "value").iter_rows())
        proof = Proof("", "records", part["records"][0], part.filter(pl.col("seed") >= 0), stored, [], out)
        summary = {(row["outcome"], row["variant"]): row for row in proof.summarise()}
        for outcome, values in proof.outcomes.items():
            changes = [show_interval(summary[outcome, variant]["change"]) for variant in VARIANTS[1:]]
            first = [str(case), str(what), f"{proof.size:,}", outcome, f"{stored[outcome]:.3g}"]
            before = is_apart_by_means({variant: list_changes(values, variant) for variant in VARIANTS})
            cells = [show_interval(summary[outcome, "all"]["value"]), *changes, proof.verdicts[outcome]]
            lines.append([*first, *cells, "yes" if before else "no"])
    head = "# A planted cause: proofs\n\nWritten by `python -m studies.planted.proofs results/planted`."
    write_page(out / "proofs.md", head, table(lines))


def show_interval(entry: Mapping[str, Any]) -> str:
    """Return a mean with its interval, at three digits."""
    mean, low, high = (entry[end] for end in ("mean", "low", "high"))
    return f"{mean:.3g}" if low is None else f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def main(out: Out, runs: Runs = Path("out/planted"), only: Only = "") -> None:
    """Prove what is not there yet, and write proofs.parquet and proofs.md."""
    torch.set_num_threads(1)
    for case, what in JOBS:
        if not f"{case}/{what}".startswith(only):
            continue
        report(f"{case}, {what}")
        arguments = what, runs, report
        proof = prove_text(*arguments) if case == "arithmetic" else prove_tic(case, *arguments)
        stored = [{"seed": -1, "variant": "run", "outcome": name, "value": each} for name, each in proof.stored.items()]
        for row in [*proof.table.to_dicts(), *stored]:
            write_line(out / "proofs.parquet", {"case": case, "left_out": what, "records": proof.size, **row}, KEYS)
        report(proof.text)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
