"""Frames as small WebP images in data URIs."""

import base64
import io
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 300
"""Pixels of a frame's width at most."""

QUALITY = 50
"""Of lossy WebP; edges of drawn environments stay legible."""

THUMB = 96
"""Pixels of a thumbnail's width."""

BEFORE, AFTER = 8, 3
"""Frames before and after a moment's face."""


def choose_steps(step: int, last: int | None = None) -> list[int]:
    """Return the steps whose frames show the moment around a step, from 0 to `last`."""
    end = step + AFTER if last is None else min(step + AFTER, last)
    return list(range(max(0, step - BEFORE), end + 1))


def encode_frames(
    frames: Collection[NDArray[np.uint8]], *, width: int = WIDTH, quality: int = QUALITY
) -> tuple[list[str], int, int]:
    """Return frames as data URIs, each lossless or lossy, whichever is smaller; and their width and height.

    Args:
        frames: (height, width, 3) each, of one size.
        width: the most pixels of width; smaller frames stay as they are.
        quality: of lossy WebP, from 0 to 100.
    """
    size = (0, 0)
    images = []
    for frame in frames:
        image = _shrink(frame, width)
        size = image.size
        images.append(_encode_smallest(image.tobytes(), size, quality))
    return images, *size


def make_thumb(frame: NDArray[np.uint8]) -> str:
    """Return a thumbnail of a frame as a data URI."""
    return _as_uri(_encode(_shrink(frame, THUMB), lossless=False, quality=40))


def _shrink(frame: NDArray[np.uint8], width: int) -> Any:
    from PIL import Image

    pixels = np.asarray(frame)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3].astype(np.uint8)))
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.BOX)
    return image


@lru_cache(maxsize=64)  # moments overlap, and in a small world the same frames come again and again
def _encode_smallest(pixels: bytes, size: tuple[int, int], quality: int) -> str:
    from PIL import Image

    image = Image.frombytes("RGB", size, pixels)
    encodings = _encode(image, lossless=True, quality=40), _encode(image, lossless=False, quality=quality)
    return _as_uri(min(encodings, key=len))


def _encode(image: Any, *, lossless: bool, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=lossless, quality=quality, method=3)
    return buffer.getvalue()


def _as_uri(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
