"""Frames of moments: replayed, each episode once, and encoded as small pictures."""

import base64
import io
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.page.content.explored_run import ExploredRun, Frames
from whence.scores import Moment

WIDTH, QUALITY = 240, 35
"""Pixels of a frame's width at most, and the quality of lossy WebP: edges of drawn environments stay legible."""

THUMB = 96
"""Pixels of a thumbnail's width."""

BEFORE, AFTER = 8, 3
"""Frames before and after a moment's face."""


def choose_steps(step: int | None) -> list[int]:
    """Return the steps whose frames show the moment around a step, from 0 on; none around an unknown one."""
    return [] if step is None else list(range(max(0, step - BEFORE), step + AFTER + 1))


def replay_moments(
    run: ExploredRun, wanted: Iterable[tuple[Moment, Sequence[int]]]
) -> dict[int, tuple[Frames, str | None]]:
    """Return frames of moments by record, and why there are none or what is wrong with them."""
    wanted = list(wanted)
    steps: dict[int, set[int]] = {}
    for moment, chosen in wanted:
        if moment.episode_id is not None and moment.step is not None and chosen:
            steps.setdefault(moment.episode_id, set()).update(chosen)
    replays = {episode: run.replay(episode, sorted(chosen)) for episode, chosen in steps.items()}

    def choose(moment: Moment, chosen: Sequence[int]) -> tuple[Frames, str | None]:
        if moment.episode_id is None or moment.step is None:
            return {}, "The record's episode or its position there is not known, so it cannot be replayed."
        frames, note = replays.get(moment.episode_id, ({}, None))
        if chosen and moment.step not in frames:
            return {}, note or "The replay ended before this step."
        return {step: frames[step] for step in chosen if step in frames}, note

    return {moment.record_id: choose(moment, chosen) for moment, chosen in wanted}


def encode_frames(frames: Frames, face: int) -> dict[str, Any] | None:
    """Return frames by step in JSON types, as data URIs, lossless or lossy, whichever is smaller; None of none."""
    if not frames:
        return None
    steps, images = list(frames), [_shrink(frame, WIDTH) for frame in frames.values()]
    shown = {"steps": steps, "face": steps.index(face), "width": images[0].width, "height": images[0].height}
    return shown | {"images": [_encode_smallest(image.tobytes(), image.size) for image in images]}


def make_thumb(frame: NDArray[np.uint8]) -> str:
    """Return a thumbnail of a frame as a data URI."""
    return _encode(_shrink(frame, THUMB), lossless=False)


def _shrink(frame: NDArray[np.uint8], width: int) -> Any:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame)).convert("RGB")
    if image.width <= width:
        return image
    return image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.BOX)


@lru_cache(maxsize=64)  # moments overlap, and in a small world the same frames come again and again
def _encode_smallest(pixels: bytes, size: tuple[int, int]) -> str:
    from PIL import Image

    image = Image.frombytes("RGB", size, pixels)
    return min((_encode(image, lossless=lossless) for lossless in (True, False)), key=len)


def _encode(image: Any, *, lossless: bool) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=lossless, quality=QUALITY, method=3)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
