"""Every private name of a host library that whence touches stands in the contract with that host."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import whence
from whence.llm.trl.completions import TRAINER_METHODS

HOSTS = ["accelerate", "deepspeed", "gymnasium", "sb3_contrib", "stable_baselines3", "torch", "transformers", "trl"]
NO_HOSTS = {
    *("_asdict", "_fields", "_replace", "_exit", "_repr_html_"),  # documented, of named tuples, `os` and IPython
    # Read by another module of whence's.
    *("_chooser", "_compute_trl_loss", "_outputs", "_processes", "_rewards", "_run"),
    *("_names", "_whence_wraps_train", "_class", "_ids"),  # texts: names of whence's, and ends of names
}
OVERRIDDEN = {
    "BaseCallback": "_init_callback _on_training_start _on_rollout_start _on_step _on_rollout_end _on_training_end",
    "VecEnv": "reset step_async step_wait seed close env_is_wrapped get_attr set_attr env_method",
    **{"DummyVecEnv": "reset step_wait", "Wrapper": "reset step close", "VectorWrapper": "reset step close"},
    **{"Module": "forward", "Trainer": "train"},
    **{"TrainerCallback": "on_train_begin on_step_end on_save"},
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), " ".join(TRAINER_METHODS)),
}


def is_private(name):
    return name.isidentifier() and ((name[:1] == "_" and name[1:2].isalpha()) or name.startswith("ds_"))


def is_own(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()")


def list_defined(tree):
    """Yield the names of functions, classes and variables, and of the attributes that classes set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store) and (isinstance(node, ast.Name) or is_own(node)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def list_reaches():
    """Yield each private name that is no name of whence's own, and its place in the sources."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in Path(whence.__file__).parent.rglob("*.py")}
    defined = {path: set(list_defined(tree)) for path, tree in trees.items()}
    everywhere = set().union(*defined.values())
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names, known = [], everywhere
            if isinstance(node, ast.Attribute):
                # Other objects than `self` are a host's, even if another module of whence has an equal name.
                names, known = [node.attr], everywhere if is_own(node) else defined[path]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            elif isinstance(node, ast.ImportFrom) and not node.module.startswith("whence"):
                names, known = [*node.module.split("."), *(alias.name for alias in node.names)], set()
            yield from ((n, f"{path.name}:{node.lineno}") for n in names if is_private(n) and n not in known)


def list_overrides():
    """Yield each method of a class of whence that overrides a host's, the host's class, and the method there."""
    for module in pkgutil.walk_packages(whence.__path__, "whence."):
        classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        for kind in (each for _, each in classes if each.__module__ == module.name):
            for place, base in enumerate(kind.__mro__):
                hosts = [each for each in kind.__mro__[place:] if each.__module__.split(".")[0] in HOSTS]
                for name, method in vars(base).items() if base.__module__.startswith("whence.") else ():
                    host = next((each for each in hosts if callable(vars(each).get(name))), None)
                    if host is not None and not name.startswith("__"):
                        yield method, host.__name__, vars(host)[name]


def test_each_private_name_stands_in_a_contract():
    tables = [importlib.import_module(path.stem).PRIVATE for path in Path(__file__).parent.glob("test_*_contract.py")]
    listed, reached = set().union(*tables), dict(list_reaches())
    assert {name: place for name, place in reached.items() if name not in listed | NO_HOSTS} == {}
    assert set(filter(is_private, listed)) <= reached.keys(), "no longer reached: take them out of the contract"


def test_each_overridden_method_is_listed_and_takes_what_the_hosts_does():
    overrides = list(list_overrides())
    listed = {(host, name) for host, names in OVERRIDDEN.items() for name in names.split()}
    assert {(host, method.__name__) for method, host, _ in overrides} == listed
    for method, host, theirs in overrides:
        specs = [inspect.getfullargspec(each) for each in (method, theirs)]
        parameters = [spec.args + spec.kwonlyargs for spec in specs]
        assert any(spec.varargs for spec in specs) or parameters[0] == parameters[1], f"{host}.{method.__name__}"
