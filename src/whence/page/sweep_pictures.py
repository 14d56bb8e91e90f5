"""Pictures as SVG: the learning curves of a sweep's experiments, and any figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go
import polars as pl

from whence.errors import Unsupported
from whence.experiments.rl.arms import is_control
from whence.experiments.rl.curves import KeptRun
from whence.experiments.shared import STANDARD
from whence.guards import write_atomically
from whence.page.figures import arm_colours, learning_curves

Labels = Mapping[str, Mapping[int, KeptRun]]
"""An experiment's finished runs, by label and seed."""


def draw_pictures(labels: Labels, folder: Path) -> list[Path]:
    """Draw an experiment's pictures and return their files.

    Raises:
        Unsupported: there is no Kaleido, or no browser that it can drive.
    """
    files = []
    for name, chosen in plan_pictures(labels).items():
        files.append(folder / f"{name}.svg")
        write_svg(_draw_curves(labels, chosen), files[-1], "pass --no-pictures. The tables are written.")
    return files


def plan_pictures(labels: Labels) -> dict[str, list[str]]:
    """Return the labels in each picture.

    `arms`: every arm at its usual share to drop; `drop`: the arms that have several shares, at all of them;
    `controls`: the arms that change the size of the step and drop nothing.
    """
    by_arm: dict[str, list[str]] = {}
    for label, runs in labels.items():
        by_arm.setdefault(next(iter(runs.values())).config.arm, []).append(label)
    controls = [label for arm, arm_labels in by_arm.items() if is_control(arm) for label in arm_labels]
    selecting = {arm: arm_labels for arm, arm_labels in by_arm.items() if not is_control(arm) and arm != STANDARD}
    # The label of a run at its experiment's own share is its arm. If several shares lack it, none is usual.
    usual = {
        arm: [label for label in arm_labels if label == arm or len(arm_labels) == 1]
        for arm, arm_labels in selecting.items()
    }
    pictures = {
        "arms": [label for arm_labels in usual.values() for label in arm_labels],
        "drop": [label for arm_labels in selecting.values() if len(arm_labels) > 1 for label in arm_labels],
        "controls": [*usual.get("iif", []), *controls] if controls else [],
    }
    standard = by_arm.get(STANDARD, [])
    with_standard = {name: [*standard, *others] for name, others in pictures.items() if others}
    return with_standard or {"arms": standard}


def _draw_curves(labels: Labels, chosen: Sequence[str]) -> go.Figure:
    tables = [
        kept.tables["evaluations"].select("round", "test_return", arm=pl.lit(label))
        for label in chosen
        for kept in labels[label].values()
    ]
    return learning_curves(pl.concat(tables), arm_colours(chosen))


def write_svg(figure: go.Figure, file: Path, remedy: str) -> None:
    """Write a figure as SVG, 760 pixels wide.

    Args:
        figure: the figure; its width and font are set.
        file: the file to write.
        remedy: what else a user can do if it cannot be drawn, for the message.

    Raises:
        Unsupported: there is no Kaleido, or no browser that it can drive.
    """
    figure.update_layout(width=760, font_family="sans-serif")
    try:
        content = bytes(figure.to_image(format="svg"))
    except (RuntimeError, TimeoutError) as missing:  # Plotly's, Kaleido's and its browser's driver's
        raise Unsupported(
            f"The picture {file} cannot be drawn: {missing} Install Kaleido and a Chrome or Chromium, or {remedy}"
        ) from missing
    with write_atomically(file) as temporary:
        temporary.write_bytes(content)
