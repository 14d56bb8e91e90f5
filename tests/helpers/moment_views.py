"""A moment drawn from hostile text, and what a picture holds."""

import numpy as np
import polars as pl
from PIL import Image

from whence.page import MomentView, read_window
from whence.page.content.moment_view import PolicyChange
from whence.scores.moments import find_moment


def measure(path):
    """Return a picture's size and its number of images."""
    with Image.open(path) as picture:
        return picture.size, getattr(picture, "n_frames", 1)


TABLE = pl.DataFrame(
    {
        "record_id": range(100),
        "env_index": [0] * 100,
        "episode_id": [0] * 60 + [1] * 40,
        "step": [*range(60), *range(40)],
        "action": [0] * 100,
        "advantage": [0.0] * 100,
        "score": [-1.0 if 29 <= at <= 31 else -9.0 if at == 30 else 1.0 for at in range(100)],
    }
)


def hostile_view():
    text = "$\\frac{x}$ [bold]<script>\x1b[2J 漢字 \N{PILE OF POO}" * 3
    table = TABLE.with_columns(error=pl.lit(0.5), keep=pl.lit(False), reward=pl.lit(1.0), value=pl.lit(2.0))
    moment = find_moment(table, 30)
    frames = {step: np.zeros((40, 60, 3), np.uint8) for step in (29, 30, 31)}
    policy = PolicyChange([text, "$b$"], [0.25, 0.75], [0.5, 0.5], (), (1.0, 2.0))
    return MomentView(
        run=text,
        env=text,
        round=1,
        moment=moment,
        row={"keep": False, "reason": text},
        window=read_window(table, moment),
        action_labels=[text, "$b$"],
        policy=policy,
        frames=frames,
        frames_note=text,
    )
