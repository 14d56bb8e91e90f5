"""Causal language models of Transformers: score prompts with their responses, and train on those that help."""

from importlib.util import find_spec

import lazy_loader

from whence.core import Unsupported

if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
    raise Unsupported(
        f"whence.llm needs the package {missing[0]}, which is not installed: in whence's source tree, pip install "
        "'.[llm]'."
    )

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
