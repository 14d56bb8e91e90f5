"""Progress bars of Transformers and Datasets, which are on or off for the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from transformers.utils import logging


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the bars of loading and saving, for files that take no time."""
    datasets_hidden = datasets.are_progress_bars_disabled()
    transformers_shown = logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if not datasets_hidden:
            datasets.enable_progress_bars()
        if transformers_shown:
            logging.enable_progress_bar()
