"""Trees of tensors: nested dicts, tuples and lists, as observations are."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

Tree: TypeAlias = Any  # a tensor, or a (nested) dict, tuple or list of trees; the first axis is the records'


def map_tree(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor of a tree of dicts, tuples and lists."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(function, branch) for branch in tree)
    return function(tree)


def named_leaves(tree: Tree, name: str = "") -> list[tuple[str, Tensor]]:
    """List a tree's tensors with their dotted names."""
    if isinstance(tree, Mapping):
        branches = list(tree.items())
    elif isinstance(tree, tuple | list):
        branches = list(enumerate(tree))
    else:
        return [(name, tree)]
    return [leaf for key, branch in branches for leaf in named_leaves(branch, f"{name}.{key}" if name else str(key))]


def take(tree: Tree, index: Tensor | slice) -> Tree:
    """Take the records at `index` from every tensor of a tree."""
    return map_tree(lambda tensor: tensor[index], tree)
