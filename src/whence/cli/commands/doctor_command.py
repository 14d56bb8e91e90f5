"""`whence doctor`."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from torch import Tensor, nn

from whence.checks import check_engines
from whence.cli.console import console, make_table, print_json, print_line
from whence.cli.options import AsJson
from whence.guards import preserve_rng_state
from whence.objectives import PPOClip
from whence.policies import ModuleView, Outputs
from whence.records import RecordBatch

_REQUIRED = ("whence", "torch", "numpy", "scipy", "polars", "safetensors", "jaxtyping")
_EXTRAS = {
    "sb3": ("stable-baselines3", "gymnasium"),
    "contrib": ("sb3-contrib",),
    "report": ("plotly", "jinja2"),
    "cli": ("typer", "rich"),
    "tensorboard": ("tensorboard",),
    "envs": ("Box2D", "minigrid"),
    "fast": ("envpool",),
    "ray": ("ray",),
    "llm": ("transformers", "trl", "accelerate", "peft", "datasets", "bm25s"),
}
_TOLERANCE = 1e-5


def doctor(json: AsJson = False) -> None:
    """Check this installation: versions, extras, and every engine against the plain loop on small networks.

    Ends with exit code 1 if an engine gives other scores than the loop.

    Example: whence doctor
    """
    machine = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    versions = {name: _find_version(name) for name in _REQUIRED}
    extras = {extra: {name: _find_version(name) for name in names} for extra, names in _EXTRAS.items()}
    engines = [row for device in _devices() for row in _check_device(device)]
    sound = all(row["sound"] for row in engines)
    if json:
        print_json({"machine": machine, "versions": versions, "extras": extras, "engines": engines, "sound": sound})
    else:
        console.print(make_table("Machine", ("what", "found"), machine.items()))
        console.print(make_table("Versions", ("package", "version"), versions.items()))
        rows = [(extra, _list_versions(packages), _advise(extra, packages)) for extra, packages in extras.items()]
        console.print(make_table("Extras", ("extra", "found", "to install"), rows))
        headings = ("network", "device", "engine", "largest difference", "sound")
        cells = [
            (
                row["network"],
                row["device"],
                row["engine"],
                _format_difference(row["difference"]),
                "yes" if row["sound"] else "NO",
            )
            for row in engines
        ]
        console.print(make_table("Engines against the loop", headings, cells))
        print_line(
            "All engines agree with the loop." if sound else "An engine is WRONG on this machine: use engine='loop'."
        )
    if not sound:
        raise typer.Exit(1)


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _list_versions(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items() if number) or "–"


def _advise(extra: str, versions: dict[str, str | None]) -> str | None:
    return None if all(versions.values()) else f"pip install '.[{extra}]'"


def _format_difference(value: float | None) -> str:
    return "refused" if value is None else f"{value:.1e}"


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _check_device(device: str) -> list[dict[str, Any]]:
    """Compare every engine with the loop, on an MLP and a convolutional network."""
    rows = []
    with preserve_rng_state():
        torch.manual_seed(0)
        networks: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
            "MLP": (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), (8,)),
            "CNN": (
                nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)),
                (3, 6, 6),
            ),
        }
        for name, (network, shape) in networks.items():
            view = ModuleView(network.to(device), _log_probs)
            table_of_engines = check_engines(view, _make_records(view, shape), objective=PPOClip(), verbose=False)
            for row in table_of_engines.to_dicts():
                sound = row["refused"] is None and row["difference"] <= _TOLERANCE
                rows.append({"network": name, "device": device, **row, "sound": sound})
    return rows


def _log_probs(network: Any, inputs: dict[str, Tensor]) -> Outputs:
    logits: Tensor = network(inputs["observations"])
    return Outputs(logits.log_softmax(-1).gather(-1, inputs["actions"][:, None]).squeeze(-1))


def _make_records(view: ModuleView, shape: tuple[int, ...]) -> RecordBatch:
    n = 64
    draft = RecordBatch(
        observations=torch.randn(n, *shape),
        actions=torch.randint(0, 4, (n,)),
        log_probs=torch.zeros(n),
        advantages=torch.randn(n),
    )
    with torch.no_grad():
        log_probs = view(view.parameters(), view.prepare(draft)).log_prob.cpu()
    return draft.with_columns({"log_probs": log_probs})
