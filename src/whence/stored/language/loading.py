"""Loading of a user's models (Transformers), data sets (Datasets) and functions (Python)."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from whence.core import WhenceError, first_line, suggest
from whence.llm.base import choose_loader
from whence.llm.text import list_columns
from whence.stored.language.language_config import search_first


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide the bars of loading and saving of Transformers and Datasets, which are on or off for the whole process."""
    datasets_hidden, transformers_shown = datasets.are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if not datasets_hidden:
            datasets.enable_progress_bars()
        if transformers_shown:
            logging.enable_progress_bar()


def load_function(name: str) -> Any:
    """Return the function "path/to/file.py:function" or "package.module:function"; its module is run.

    Modules are looked for in the working directory and on PYTHONPATH; those that a file imports also in its folder.

    Raises:
        WhenceError: there is no such file, module or function, or the module raises an error.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise WhenceError(f"{name!r} names no function; give file.py:function or package.module:function.")
    try:
        if source.endswith(".py"):
            module = _run_file(Path(source).resolve(), Path(source).stat().st_mtime_ns)
        else:
            with search_first(Path.cwd()):
                module = importlib.import_module(source)
    except Exception as error:
        raise WhenceError(
            f"{source}, from {name}, cannot be run: {first_line(error)}. Modules are looked for in the working "
            f"directory ({Path.cwd()}) and on PYTHONPATH."
        ) from error
    if not callable(function := getattr(module, attribute, None)):
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise WhenceError(f"{source} has no function {attribute!r}.{suggest(attribute, names)}")
    return function


class _FromSource(SourceFileLoader):
    """Runs a file without stored bytecode, which may be of an edit in the same second."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


@cache
def _run_file(path: Path, modified: int) -> Any:
    """Return a file as a module; it is run once for all its functions, and again after a modification."""
    name = f"whence_user_{path.stem}_{modified}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    with search_first(path.parent):
        spec.loader.exec_module(module)
    return module


def load_data(name: str) -> Any:
    """Return the data set of a directory, a file or an id; if it has splits, the one named train, or the first.

    Raises:
        WhenceError: it cannot be loaded, or has no column "prompt".
    """
    kind = {".jsonl": "json"}.get(Path(name).suffix, Path(name).suffix[1:])
    try:
        if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):  # by save_to_disk
            data = datasets.load_from_disk(name)
        elif kind in ("json", "csv", "parquet"):
            data = datasets.load_dataset(kind, data_files=name)
        else:
            data = datasets.load_dataset(name)
        data = data["train" if "train" in data else next(iter(data))] if isinstance(data, dict) else data
        list_columns(data)
    except Exception as error:
        raise WhenceError(f"The data set {name} cannot be loaded: {first_line(error)}") from error
    return data


def load_language_model(name: str, dtype: str, kind: Any = AutoModelForCausalLM, **options: Any) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer.

    A tokenizer without a pad token pads with the end-of-text token; masks separate padding from ends.
    """
    model = load_pretrained(kind, name, dtype=getattr(torch, dtype), **options)
    tokenizer = load_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_checkpoint(name: str, dtype: str) -> tuple[Any, Any]:
    """Return the causal language model of a folder or an id, or a PEFT adapter with its base, and the tokenizer."""
    kind, options = choose_loader(name)
    model, tokenizer = load_language_model(name, dtype, kind, **options)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Return the model or tokenizer that one of Transformers' Auto classes loads from a directory or id.

    Weights are read from safetensors alone, since other formats are pickles, and no code that comes with a model runs.

    Raises:
        WhenceError: it cannot be loaded.
    """
    what, remedy = "tokenizer" if kind is AutoTokenizer else "model", ""
    if what == "model":
        options["use_safetensors"] = True
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        if "trust_remote_code" in str(error):
            remedy = " whence runs no code that comes with a model: load it in a script, and pass it to the trainer."
        elif "safetensors" in str(error):
            remedy = (
                " whence reads weights from safetensors alone: other formats are pickles, which may run code. Convert "
                "weights that you trust: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)."
            )
        raise WhenceError(f"The {what} {name} cannot be loaded: {first_line(error)}{remedy}") from error
