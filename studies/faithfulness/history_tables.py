"""Tables of rows whose commands are history: ablations, linear predictors, gradients, and selections on fresh steps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from studies.faithfulness.means import means_of, over_rounds
from studies.faithfulness.rows import ROUND
from studies.shared import cell, grid, read_list, table

Means = dict[tuple[Any, ...], Any]

OUTSIDE = ("outside", "outside, halves")

ALL, ONCE = "all", ", normalised once"
"""The name of the selection of all records, and the ending of those whose advantages are normalised over all."""

STEPS = 100_000
"""Fresh steps of a round: one half judges selections, and the other is a fresh target."""

GRADIENTS = ("all", "random", "iif", "not negative")

LESS = {"less": "less all's", "less as long": "less all's, as long", "less as far": "less all's, as far"}


def ablation_means(rows: pl.DataFrame) -> Means:
    """Return the LDS of each variant of the smoothed score by group, score, share and truth, over seeds."""
    return means_of(rows, ["group", "score", "share", "truth"], "lds")


def clipping_means(rows: pl.DataFrame) -> Means:
    """Return what the clip range does by group, phase ("all": the mean of a seed's) and whether there is one."""
    if rows.is_empty():
        return {}
    rows = rows.with_columns(clipped=pl.when("clipped").then(pl.lit("clipped")).otherwise(pl.lit("not clipped")))
    both = pl.concat([rows, rows.with_columns(phase=pl.lit("all"))])
    return means_of(both, ["group", "phase", "clipped"], "lds", *OUTSIDE)


def ablation_sections(variants: Means, clipping: Means) -> Iterator[str]:
    """Yield the tables of what `ablation_means` and `clipping_means` return."""
    places = {f"{share:.0%}, {truth}": (share, truth) for _, _, share, truth in variants}
    for group in dict.fromkeys(key[0] for key in variants):

        def show(score: str, place: str, group: str = group) -> str:
            return cell(variants.get((group, score, *places[place]), {}).get("lds"))

        lines = grid("score", dict.fromkeys(key[1] for key in variants), [*places], show)
        yield f"## What the smoothed score is made of, and others like it: LDS of the target, {group}\n\n{lines}"
    if clipping:
        lines = [["", "rounds", "LDS of unrolled", "ratios outside after the round", "after training on a half"]]
        for (group, phase, clipped), row in clipping.items():
            lines.append([f"{group}, {clipped}", phase, *(cell(row[name]) for name in ("lds", *OUTSIDE))])
        yield (
            "## The derivative, with the clip range and without\n\nLDS of the target, halves along the recorded "
            "minibatches, of the same rounds trained again with their clip range and with none; and the share of all "
            f"records' ratios that end outside of it.\n\n{table(lines)}"
        )


def read_additive(out: Path) -> Means:
    """Return, by outcome and group, what the best sum of scores reaches on 4,000 trainings of a round, its ceiling.

    With it what scores, and linear predictors fitted to some of the trainings, reach on the same trainings.
    """
    means: Means = {}
    contents = {(row["env"], row["optimizer"]): row for row in read_list(out / "datamodels.parquet", ROUND[:2])}
    for (env, optimizer), content in sorted(contents.items(), reverse=True):
        for ceiling in content["ceilings"]:
            outcome = ceiling["outcome"]
            fits = [row for row in content["datamodels"] if row["outcome"] == outcome and row["lds"] is not None]
            means[outcome, f"{env}-{optimizer}"] = {
                "round": content["round"],
                "ceiling": {"mean": ceiling["lds"], "low": ceiling["low"], "high": ceiling["high"]},
                "fits": {(row["trainings"], row["prior"]): row for row in fits},
                "scores": {row["score"]: row["lds"] for row in content["scores"] if row["outcome"] == outcome},
            }
    return means


def additive_sections(means: Means, scores: Sequence[str], outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yield the tables of what `read_additive` returns."""
    for outcome in dict.fromkeys(key[0] for key in means):
        groups = {group: study for (name, group), study in means.items() if name == outcome}

        def show_score(score: str, group: str, groups: Mapping[str, Any] = groups) -> str:
            lds, ceiling = groups[group]["scores"].get(score), groups[group]["ceiling"]["mean"]
            share = f" ({lds / ceiling:.0%})".replace("-", "−") if lds is not None and ceiling > 0 else ""
            return cell(lds) + share

        lines = [grid("", scores, [*groups], show_score)]
        for trainings, prior in dict.fromkeys(fit for study in groups.values() for fit in study["fits"]):
            names = {f"linear, {trainings:,} trainings" + (f", from {prior}" if prior else ""): "lds"}
            names |= {f"{prior}, on these {trainings:,}": "prior_lds"} if prior else {}
            for name, key in names.items():
                fits = [study["fits"].get((trainings, prior), {}).get(key) for study in groups.values()]
                lines.append(f"| {name} | {' | '.join(map(cell, fits))} |")
        ceilings = " | ".join(cell(study["ceiling"]) for study in groups.values())
        rounds = ", ".join(f"{group} {study['round']}" for group, study in groups.items())
        yield (
            f"## The best sum of scores: {outcomes[outcome]}, 50% of the records, recorded minibatches\n\n"
            f"LDS over all trainings of one round of seed 0 ({rounds}), and as a share of the additive ceiling: what "
            "the best sum of scores would come to, estimated without a fit. Linear predictors are cross-validated.\n\n"
            + "\n".join([*lines, f"| *additive ceiling* | {ceilings} |"])
        )


def cosine_sections(means: Means, groups: Sequence[str]) -> Iterator[str]:
    """Yield how well the gradient of what a rule keeps agrees with that of a much larger rollout."""
    if not means:
        return
    yield "## Cosine of a rollout's gradient with that of 200,000 steps"
    for truth, advantages in [(truth, name) for truth in ("gae", "monte-carlo") for name in ("raw", "centred")]:

        def show(kept: str, group: str, place: tuple[str, str] = (truth, advantages)) -> str:
            return cell(means[(*place, group, kept)]["cosine"])

        lines = grid("records kept", GRADIENTS, groups, show)
        entries = (means[truth, advantages, group, "all"]["reliability"] for group in groups)
        reliable = " | ".join(cell(entry, interval=False) for entry in entries)
        yield f"Advantages {advantages}, against {truth} advantages:\n\n{lines}\n| *reliability* | {reliable} |"


def compare_selections(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each round, selection and kind of advantages: means over orders, held against training on all.

    A selection whose advantages are normalised once is held against training on everything so; and that against
    training on everything as it is, where no update of its is known that goes as far.
    """
    by = [*ROUND, "group", "advantages"]
    whole = pl.col("selection") == ALL + ONCE
    once = pl.col("selection").str.ends_with(ONCE) & ~whole
    of_orders = rows.group_by(*by, "selection", maintain_order=True).agg(
        pl.col("gain", "all_as_long", "all_as_far", "kl", "entropy", "kept").mean()
    )
    named = of_orders.with_columns(
        pl.when(whole).then(None).otherwise(pl.col("all_as_long", "all_as_far")).name.keep(),
        base=pl.when(once).then(pl.lit(ALL + ONCE)).otherwise(pl.lit(ALL)),
    )
    base = of_orders.select(*by, base="selection", gain_all="gain", kl_all="kl", entropy_all="entropy")
    return named.join(base, on=[*by, "base"], how="left", maintain_order="left").with_columns(
        (pl.col("gain") - pl.col("gain_all")).alias("less"),
        (pl.col("gain") - pl.col("all_as_long")).alias("less as long"),
        (pl.col("gain") - pl.col("all_as_far")).alias("less as far"),
        kl=pl.col("kl") / pl.col("kl_all"),
        entropy=pl.col("entropy") - pl.col("entropy_all"),
    )


def selection_means(rows: pl.DataFrame) -> Means:
    """Return means over rounds and seeds by kind of advantages, group and selection, with 95% bootstrap intervals.

    A round of a seed is one unit, which makes them too narrow as far as rounds of a seed are alike. So there is also
    what each seed gains, in what all gains in the mean over all seeds: in its own it would be wild.
    """
    means: Means = {}
    compared = rows if rows.is_empty() else compare_selections(rows)
    for key, group in (
        [] if rows.is_empty() else compared.group_by("advantages", "group", "selection", maintain_order=True)
    ):
        row: dict[str, Any] = {name: over_rounds(group[name].to_list()) for name in ("gain", "kl", "entropy", "kept")}
        for name in LESS:
            row[name] = over_rounds(group[name].to_list(), group["gain_all"].to_list())
            known = group.drop_nulls(name)
            seeds = known.group_by("seed", maintain_order=True).agg(pl.col(name).mean() / known["gain_all"].mean())
            shares = [] if row[name]["mean"] is None else seeds[name]
            row[f"{name}, seeds"] = ", ".join(cell(share, percent=True) for share in shares)
        means[key] = row
    return means


def selection_sections(means: Means) -> Iterator[str]:
    """Yield the tables of what `selection_means` returns."""
    if not means:
        return
    yield (
        "## What selections gain on fresh steps\n\n"
        f"The rise of mean(ρÂ) over {STEPS // 2:,} steps that no training saw, in standard deviations of Â (returns "
        "less values); means over rounds and seeds, differences from all's in percent of all's mean. *As long*: all's "
        "update, made as long as the selection's. *As far*: all's, made longer or shorter until the policy diverges "
        "as much. What is normalised once is held against all, normalised once."
    )
    head = ["records kept", "share", "gain", *LESS.values(), "divergence, over all's", "entropy, less all's"]
    head += ["less all's, as far, Â by GAE", "less all's, of each seed", "as far, of each seed"]
    for group in sorted({key[1] for key in means}, reverse=True):
        rows = {key[2]: row for key, row in means.items() if key[:2] == ("monte-carlo", group)}
        lines, whole = [head], rows[ALL]
        for selection, row in rows.items():
            cells = [*(cell(row[name], percent=True) for name in LESS), cell(row["kl"], digits=2), cell(row["entropy"])]
            cells.append(cell(means["gae", group, selection]["less as far"], percent=True))
            cells += [row["less, seeds"], row["less as far, seeds"]]
            share = cell(row["kept"]["mean"] / whole["kept"]["mean"], percent=True)
            gain = cell(row["gain"], interval=selection == ALL, digits=4)
            lines.append([selection, share, gain, *(cells if selection != ALL else [""] * len(cells))])
        yield f"### {group}, {whole['gain']['rounds']} rounds\n\n{table(lines)}"
