"""`whence import`."""

from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import RoundBar, options, print_json, print_line
from whence.stored import import_rollouts


def import_(
    file: Annotated[Path, typer.Argument(help="An .npz, or the folder of a data set of Minari's or LeRobot's.")],
    out: Annotated[Path, options.optional(help="The run directory to write.")],
    env: Annotated[
        str | None, options.optional(help="The Gymnasium environment: an id, or module:Id. It is not made.")
    ] = None,
    round: Annotated[int, typer.Option(help="The steps of all environments that are a round.", min=1)] = 2048,
    json: options.AsJson = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Make a run of rollouts that another program has stored, for `whence findings`, `view`, `show` and `report`.

    An .npz holds arrays of (steps, environments, ...), or (steps, ...) of one environment: observations, actions,
    rewards, terminations and perhaps truncations; or obs, act, rew, terminated or dones, truncated. Row t is the
    observation before action t, the reward for it, and whether the episode ends with it. Further numbers of each step
    are infos.

    Minari's data sets are a folder with main_data.hdf5, or that file, and need h5py. LeRobot's are a folder with meta
    and data, whose observation.state is read, and no video. Pickles, such as replay buffers, are refused.

    --env gives the names of actions and the time limit, as they are registered. Spaces are taken from the arrays.

    Example: whence import rollouts.npz --out runs/imported --env CartPole-v1
    """
    with RoundBar("steps", "import", "step") as bar:
        run = import_rollouts(file, out, env=env, round=round, overwrite=overwrite, on_steps=bar.update)
    metrics, imported = run.table("metrics"), run.config["imported"]
    counts = {"records": int(metrics["records"].sum()), "rounds": len(metrics)}
    if json:
        print_json({"run": str(out), "format": imported["format"], **counts, "not_read": imported["not_read"]})
        return
    print_line(f"{out}: {counts['records']:,} records in {counts['rounds']:,} rounds. Next: whence findings {out}")
    if imported["not_read"]:
        print_line(f"Not read: {', '.join(imported['not_read'])}.")
