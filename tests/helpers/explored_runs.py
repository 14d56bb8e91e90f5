"""A run written by hand, and its records."""

import numpy as np
import polars as pl

from whence.page import ExploredRun
from whence.runs import RunDirectory

HOSTILE = "</script><script>alert(1)</script>\u202e\u2028"


def table_of(n=60, **columns):
    """Six episodes of ten steps; record i scores (7i mod n) - n/2, with error 10."""
    ids = np.arange(n)
    scores = (7 * ids % n - n / 2).astype(np.float32)
    keep = scores >= -n / 4
    table = {"record_id": ids, "env_index": 0 * ids, "episode_id": ids // 10, "step": ids % 10, "action": ids % 4}
    table |= {name: (ids / 7).astype(np.float32) for name in ("log_prob", "value", "advantage", "return")}
    table |= {"reward": np.ones(n, dtype=np.float32), "observation": np.stack([ids, -ids], axis=1).astype(np.float32)}
    table |= {"score": scores, "error": np.full(n, 10.0), "keep": keep}
    table |= {"weight": keep.astype(np.float32), "reason": [None if kept else "too low" for kept in keep]}
    table |= columns
    return pl.DataFrame({name: column for name, column in table.items() if column is not None})


def run_of(path, table=None, config=None, rounds=(1,)):
    directory = RunDirectory.create(
        path, config or {"env": "Some-v0", "experiment": {"arm": "iif", "seed": 3, "rounds": 2}}
    )
    for number in rounds:
        directory.write_round("records", number, table_of() if table is None else table)
        directory.append("metrics", {"round": number, "episode_return": 1.0 * number, "dropped_share": 0.25})
    return ExploredRun(path)
