"""Loading of a user's models (Transformers), data sets (Datasets) and functions (Python)."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whence.errors import WhenceError, first_line, suggest
from whence.experiments.llm.outputs import search_first
from whence.llm.text.prompts import list_columns


@contextmanager
def ignore_old_names() -> Iterator[None]:
    """Hide Transformers' warning of names that PEFT and TRL still use; whence has no part in it, and no cure."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing.*is deprecated", FutureWarning)
        yield


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


@cache
def _run_file(path: Path, modified: int) -> Any:
    """Return a file as a module; it is run once for all its functions, and again after a modification."""
    name = f"whence_user_{path.stem}_{modified}"
    spec = importlib.util.spec_from_file_location(name, path)
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
        WhenceError: it cannot be loaded.
    """
    try:
        if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):  # by save_to_disk
            data = datasets.load_from_disk(name)
        elif Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet"):
            kind = {".jsonl": "json"}.get(Path(name).suffix, Path(name).suffix[1:])
            data = datasets.load_dataset(kind, data_files=name)
        else:
            data = datasets.load_dataset(name)
    except Exception as error:
        raise WhenceError(f"The data set {name} cannot be loaded: {first_line(error)}") from error
    return data["train" if "train" in data else next(iter(data))] if isinstance(data, dict) else data


def check_prompts(dataset: Any, name: str) -> Any:
    """Check that a data set has prompts, and return it.

    Raises:
        WhenceError: it has no column "prompt".
    """
    try:
        list_columns(dataset)
    except WhenceError as error:
        raise WhenceError(f"{name}: {error}") from error
    return dataset


def load_model(name: str, dtype: str) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer.

    A tokenizer without a pad token pads with the end-of-text token; masks separate padding from ends.
    """
    model = load_pretrained(AutoModelForCausalLM, name, dtype=getattr(torch, dtype))
    tokenizer = load_pretrained(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Return the model or tokenizer that one of Transformers' Auto classes loads from a directory or id.

    Weights are read from safetensors alone, since other formats are pickles, and no code that comes with a model runs.

    Raises:
        WhenceError: it cannot be loaded.
    """
    try:
        if kind is not AutoTokenizer:
            options["use_safetensors"] = True
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:
        what = "tokenizer" if kind is AutoTokenizer else "model"
        raise WhenceError(f"The {what} {name} cannot be loaded: {_explain_refusal(error)}") from error


def _explain_refusal(error: Exception) -> str:
    """Return why Transformers refuses a model, in words; and what to do if it would have to run code."""
    if "trust_remote_code" in str(error):
        return (
            "it comes with Python code of its own, and whence runs none. Load it in a script, if you trust the code, "
            "and pass the model to the trainer; or choose a model of an architecture that Transformers has."
        )
    if "safetensors" in str(error):
        return (
            f"{first_line(error)} whence reads weights from safetensors alone: other formats are pickles, which may "
            "run code. Convert weights that you trust: AutoModelForCausalLM.from_pretrained(NAME)"
            ".save_pretrained(FOLDER), and give FOLDER."
        )
    return first_line(error)
