"""Whether what raises the target raises the test return, as far as each order of a round's trainings can tell.

All subsets of an order are tested on one seed, so that they differ by more than chance; but then what that seed makes
of them is theirs in common, and no number of subsets averages it out. So a round says as much as its orders agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from studies.faithfulness.run import SETUPS
from studies.markdown import table
from studies.stored import read_rounds

SHARE = "0.5"


def by_order(out: Path) -> list[dict[str, Any]]:
    """Return Spearman's correlation of the target, mean of the orders, with each order's tests, by tested round."""
    rounds, tables = read_rounds(out, "round"), []
    for env, optimizer in SETUPS:
        for content in (row for row in rounds if (row["env"], row["optimizer"]) == (env, optimizer)):
            outcomes = content["outcomes"][SHARE]["reshuffled"]
            if "evaluated" in outcomes:
                target = np.mean(outcomes["target"], axis=0)
                correlations = [_spearman(target, np.array(tested)) for tested in outcomes["evaluated"]]
                place = {"group": f"{env}-{optimizer}", "seed": content["seed"], "round": content["round"]}
                tables.append(place | {"orders": correlations})
    return tables


def _spearman(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float | None:
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(stats.spearmanr(one, other).statistic)


def sections(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield the table, where there is anything to tell."""
    if rows:
        cells = [[row["group"], str(row["seed"]), str(row["round"]), _listed(row["orders"])] for row in rows]
        yield (
            "## The target and the measured test return, by order\n\nSpearman's correlation over subsets of 50%, "
            "reshuffled, of the target (mean of the orders) with the test returns of each order. All subsets of an "
            "order are tested on the same seed, so intervals of LDS of the test return, which are over subsets, do not "
            "hold what that seed does, and neither do tables of recorded minibatches, which have one. A round tells as "
            f"much as its orders agree.\n\n{table([['', 'seed', 'round', 'orders'], *cells])}"
        )


def _listed(values: Sequence[float | None]) -> str:
    return ", ".join("–" if value is None else f"{value:.2f}".replace("-", "−") for value in values)
