"""Scores by some of a policy's layers: which parameters these are, and the view that has no others."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor, nn

from whence.core import PartialView, PolicyView, WhenceError

Layers: TypeAlias = int | str | Sequence[str]
"""Which layers: the number of last blocks; or patterns of parameters' names, such as "*.lora_*"."""


def restrict_view(view: PolicyView, layers: Layers | None) -> PolicyView:
    """Return the view with the trainable parameters of some layers alone; the others are constants to it.

    Where the layers are the last ones of a network, derivatives end at the first of them, and cost less.

    Args:
        view: the policy's view.
        layers: see `choose_parameters`; None: all of them.

    Raises:
        WhenceError: see `choose_parameters`.
    """
    if layers is None:
        return view
    return PartialView(view, choose_parameters(view.module, view.parameters(), layers))


def choose_parameters(module: nn.Module, parameters: Mapping[str, Tensor], layers: Layers) -> list[str]:
    """Return the names of the trainable parameters of some layers.

    Args:
        module: the policy's module.
        parameters: its trainable parameters by name.
        layers: a number k: the last k blocks, see `find_blocks`. A pattern, or several: the parameters whose names
            match one; `*` stands for any characters.

    Raises:
        WhenceError: there are no such layers, or none with trainable parameters.
    """
    if not isinstance(layers, int):
        return _match_names(parameters, layers)
    path, blocks = find_blocks(module)
    if not 1 <= layers <= len(blocks):
        raise WhenceError(f"layers is {layers}; a number from 1 to {len(blocks)}, the blocks of `{path}`, is needed.")
    owners = {id(p) for block in blocks[len(blocks) - layers :] for p in block.parameters()}
    if names := [name for name, parameter in parameters.items() if id(parameter) in owners]:
        return names
    raise WhenceError(
        f"The last {layers} blocks of `{path}` have no trainable parameter; give more blocks or patterns."
    )


def _match_names(parameters: Mapping[str, Tensor], layers: str | Sequence[str]) -> list[str]:
    patterns = [layers] if isinstance(layers, str) else layers
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            shown = ", ".join(list(parameters)[:3]) or "none"
            raise WhenceError(
                f"layers holds the pattern {pattern!r}, which no trainable parameter's name matches. Names are {shown} "
                f"and so on; there are {len(parameters)}."
            )
    return [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]


def find_blocks(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the blocks of a network, and their list's name: its longest `ModuleList` of modules of one class.

    A list inside another one, such as the experts of a block, does not count. Nor does one outside the decoder of a
    model that names it by `get_decoder`, as Transformers' models do: a vision tower gives no logits.

    Raises:
        WhenceError: there is no such list of two modules or more, or there are several of the same length.
    """
    decoder = _find_decoder(module)
    lists = {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1
        if not decoder or path.startswith(f"{decoder}.")
    }
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    most = max((len(lists[path]) for path in outer), default=0)
    longest = [path for path in outer if len(lists[path]) == most]
    if len(longest) != 1:
        what = (
            f"several lists of {most} blocks, {', '.join(longest)}" if longest else "no ModuleList of several modules"
        )
        raise WhenceError(
            f"layers is a number of last blocks, and {type(module).__name__} has {what}. Give patterns of parameters' "
            'names, such as "*.lora_*".'
        )
    return longest[0], lists[longest[0]]


def _find_decoder(module: nn.Module) -> str:
    """Return the name of the module that a model calls its decoder; "" if none does, or if it is the whole module."""
    for child in module.modules():
        if callable(get_decoder := getattr(child, "get_decoder", None)):
            decoder = get_decoder()
            return next((path for path, other in module.named_modules() if other is decoder), "")
    return ""
