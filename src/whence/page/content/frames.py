"""Frames of moments: replayed, each episode once, and encoded as small pictures."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.page.content.explored_run import ExploredRun, Frames
from whence.scores import Moment, list_observations

WIDTH, QUALITY = 240, 35
"""Pixels of a frame's width at most, and the quality of lossy WebP: edges of drawn environments stay legible."""

THUMB = 96
"""Pixels of a thumbnail's width at most."""

_DTYPES = {"uint8": np.uint8, "bool": np.bool_}
"""What a stored picture's numbers are taken for, by its space's dtype; others are scaled to their range."""

_SMALLEST = 5
"""Pixels of a picture's height and width at least: an array of fewer is a table of numbers."""

BEFORE, AFTER = 8, 3
"""Frames before and after a moment's face."""


def choose_steps(step: int | None, every: int = 1) -> list[int]:
    """Return the steps, each or every second, whose frames show the moment around one; none around an unknown one."""
    before = BEFORE // every * every
    return [] if step is None else [at for at in range(step - before, step + AFTER + 1, every) if at >= 0]


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


def read_picture(row: Mapping[str, Any], space: Any) -> NDArray[np.uint8] | None:
    """Return the stored observation of a record as a picture (height, width, 3); None of what is no picture.

    Of a Dict it is the first picture, and of a stack of frames the last frame. `space` is the configuration's.
    """
    for column in list_observations(list(row)):
        part: Any = space
        for key in filter(None, column.partition(".")[2].split(".")):
            part = (part.get("spaces") or {}).get(key) if isinstance(part, Mapping) else None
        shape = tuple(part.get("shape") or ()) if isinstance(part, Mapping) else ()
        if row[column] is not None and len(shape) == 3:
            values = np.asarray(row[column], dtype=_DTYPES.get(part.get("dtype"))).reshape(shape)
            channels = 0 if shape[0] < shape[2] else 2
            if min(np.delete(shape, channels)) >= _SMALLEST:
                return _colour(np.moveaxis(values, channels, 2))
    return None


def _colour(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an image (height, width, channels) in three colours from 0 to 255; numbers of another range are scaled."""
    depth = values.shape[2]
    image: NDArray[Any] = values[..., -3:] if depth % 3 == 0 else values[..., -1:]
    if image.dtype != np.uint8:
        image = np.asarray(values.any(axis=2, keepdims=True)) if values.dtype == np.bool_ else image
        low, high = float(image.min()), float(image.max())
        image = (255 * (image - low) / ((high - low) or 1)).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(image, (*image.shape[:2], 3)))


def make_thumb(frame: NDArray[np.uint8]) -> str:
    """Return a thumbnail of a frame as a data URI; a small one keeps its pixels."""
    return _encode_smallest((image := _shrink(frame, THUMB)).tobytes(), image.size)


def _shrink(frame: NDArray[np.uint8], width: int) -> Any:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(frame)).convert("RGB")
    if image.width <= width:
        return image
    return image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.BOX)


@lru_cache(maxsize=64)  # moments overlap, and in a small world the same frames come again and again
def _encode_smallest(pixels: bytes, size: tuple[int, int]) -> str:
    from PIL import Image

    image, texts = Image.frombytes("RGB", size, pixels), []
    for lossless in (True, False):
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", lossless=lossless, quality=QUALITY, method=3)
        texts.append("data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii"))
    return min(texts, key=len)
