"""What a user names and a run reads: models and data sets of Transformers and Datasets, functions of Python."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from whence.errors import WhenceError, first_line, suggest
from whence.llm.footprint import without_weights
from whence.llm.prompts import list_columns


def load_function(name: str) -> Any:
    """Return the function that "path/to/file.py:function" or "package.module:function" names; its module is run.

    Modules are also looked for in the working directory, and what a file imports beside it.

    Raises:
        WhenceError: there is no such file, module or function, or it is none.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise WhenceError(f"{name!r} names no function; give file.py:function or package.module:function.")
    try:
        if place.endswith(".py"):
            module = _run_file(Path(place).resolve(strict=True), Path(place).stat().st_mtime_ns)
        else:
            with _imports_from(Path.cwd()):
                module = importlib.import_module(place)
    except FileNotFoundError as wrong:
        raise WhenceError(f"{place}, which {name} names, is not there.") from wrong
    except Exception as wrong:
        raise WhenceError(f"{place}, which {name} names, cannot be run: {first_line(wrong)}") from wrong
    if not callable(found := getattr(module, attribute, None)):
        known = [own for own in vars(module) if callable(vars(module)[own]) and not own.startswith("_")]
        raise WhenceError(f"{place} has no function {attribute!r}.{suggest(attribute, known)}")
    return found


@cache
def _run_file(path: Path, changed: int) -> Any:
    """Return a file as a module; it is run once for all of its functions, and again when it has changed."""
    name = f"whence_given_{path.stem}_{changed}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with _imports_from(path.parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def load_data(name: str) -> Any:
    """Return a data set of a directory, a file, or an id, and of several splits the one to train on.

    Raises:
        WhenceError: it cannot be loaded.
    """
    try:
        if any((Path(name) / written).exists() for written in ("state.json", "dataset_dict.json")):  # by save_to_disk
            found = datasets.load_from_disk(name)
        elif Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet"):
            kind = {".jsonl": "json"}.get(Path(name).suffix, Path(name).suffix[1:])
            found = datasets.load_dataset(kind, data_files=name)
        else:
            found = datasets.load_dataset(name)
    except Exception as wrong:
        raise WhenceError(f"The data set {name} cannot be loaded: {first_line(wrong)}") from wrong
    return found["train" if "train" in found else next(iter(found))] if isinstance(found, dict) else found


def check_prompts(dataset: Any, name: str) -> Any:
    """Return a data set that has prompts.

    Raises:
        WhenceError: it has no column "prompt".
    """
    try:
        list_columns(dataset)
    except WhenceError as wrong:
        raise WhenceError(f"{name}: {wrong}") from wrong
    return dataset


def load_model(name: str, dtype: str, *, weights: bool = True) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer; without weights, a model of shapes alone.

    A tokenizer without a pad token pads with the end-of-text token, which masks tell apart.
    """
    model = load_pretrained(AutoModelForCausalLM, name, weights=weights, dtype=getattr(torch, dtype))
    tokenizer = load_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_pretrained(kind: Any, name: str, *, weights: bool = True, **how: Any) -> Any:
    """Return what one of Transformers' Auto classes makes of a directory or id.

    Raises:
        WhenceError: it cannot be loaded.
    """
    try:
        if weights or kind is AutoTokenizer:
            return kind.from_pretrained(name, **how)
        with without_weights():
            return kind.from_config(AutoConfig.from_pretrained(name), **how)
    except Exception as wrong:
        what = "tokenizer" if kind is AutoTokenizer else "model"
        raise WhenceError(f"The {what} {name} cannot be loaded: {first_line(wrong)}") from wrong
