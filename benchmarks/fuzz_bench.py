"""What is fuzzed: small real runs and files, a copy of them to damage, and a watch over everything around it."""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import polars as pl
import torch
from stable_baselines3 import PPO
from torch import nn

from benchmarks.fuzz_damage import damage_bytes, damage_json, damage_parquet, remove, replace_file
from benchmarks.fuzz_tensors import damage_safetensors
from whence import IIF, Return, RunDirectory, attribute
from whence.experiments import RunConfig, configure, run, summarise_sweep
from whence.experiments.rl.curves import CurveFiles
from whence.experiments.sweep import load_sweep
from whence.guards import read_rng_state
from whence.llm.ppo import ppo_run as checkpoints
from whence.runs.checkpoints import save_tree
from whence.sb3 import InfluenceCallback, collect

SWEEP = """metrics = ["train/entropy_loss"]

[[experiment]]
name = "lake"
env = "FrozenLake-v1"
arms = ["ppo", "iif"]
seeds = 2
drop = [0.25, 0.5]
rounds = 2
env_kwargs = { is_slippery = false }
hyperparameters = { n_steps = 32, batch_size = 32, learning_rate = 1e-3 }
policy_kwargs = { net_arch = [8] }
target = "action"
target_args = { observation = 3, action = 1 }
"""


class Escaped(BaseException):
    """Something outside the damaged copy was changed, or code from a file was to run."""


@dataclass
class Bench:
    """The damaged copy and what is around it.

    Attributes:
        root: holds all else; nothing in it may change except below `stage` and `work`.
        base: the whole files.
        stage: the copy that is damaged and read.
        work: the working directory of commands.
        model: the module of the checkpoint.
    """

    root: Path
    base: Path
    stage: Path
    work: Path
    model: nn.Module = field(default_factory=lambda: nn.Linear(3, 2))
    _around: dict[str, tuple[int, int]] = field(default_factory=dict)
    _contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def create(cls, root: Path) -> "Bench":
        """Make the runs and files in a new directory."""
        bench = cls(root, root / "base", root / "stage", root / "work")
        bench.work.mkdir(parents=True)
        (root / "sentinel" / "inner").mkdir(parents=True)
        for name in ("sentinel/one.txt", "sentinel/inner/two.json", "before.txt"):
            (root / name).write_text('{"do not": "touch"}', encoding="utf-8")
        if not bench.base.exists():
            make_files(bench.base, bench.model)
        bench.open()
        return bench

    def open(self) -> None:
        """Copy the whole files to the stage, and note what is around it."""
        remove(self.stage)
        shutil.copytree(self.base, self.stage)
        files = [path for path in self.base.rglob("*") if path.is_file()]
        self._contents = {path.relative_to(self.base).as_posix(): path.read_bytes() for path in sorted(files)}
        self._around = self._list_around()

    def files(self, *prefixes: str) -> list[str]:
        """Return the names of the whole files that begin with one of the prefixes."""
        return [name for name in self._contents if name.startswith(prefixes)]

    def read_whole(self, name: str) -> bytes:
        """Return a whole file's bytes."""
        return self._contents[name]

    def damage(self, name: str, rng: random.Random) -> None:
        """Damage a file of the stage, as its kind suggests."""
        path, data = self.stage / name, self._contents[name]
        remove(path)  # the link that it may be by now leads to a file that is to stay
        path.write_bytes(data)
        kind = rng.random()
        if kind < 0.04:
            replace_file(path, rng, self.root / "sentinel" / "one.txt")
        elif kind < 0.06:
            path.write_bytes(self._contents[rng.choice(list(self._contents))])
        elif path.suffix == ".parquet":
            path.write_bytes(damage_parquet(data, rng, self.work))
        elif path.suffix == ".safetensors":
            path.write_bytes(damage_safetensors(data, rng))
        elif path.suffix == ".jsonl" or name.startswith("prompts"):
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = damage_json(lines[at], rng).replace(b"\n", b" " if rng.random() < 0.9 else b"\n")
            path.write_bytes(b"\n".join([*lines, b""]))
        elif path.suffix == ".json":
            path.write_bytes(damage_json(data, rng))
        else:
            path.write_bytes(damage_bytes(data, rng))

    def restore(self) -> None:
        """Make the stage whole again, and empty the working directory."""
        there = set()
        for folder, names, files in os.walk(self.stage):
            for name in [*files, *[each for each in names if (Path(folder) / each).is_symlink()]]:
                path = Path(folder) / name
                relative = path.relative_to(self.stage).as_posix()
                if relative not in self._contents or path.is_symlink():
                    remove(path)
                else:
                    there.add(relative)
        for name, data in self._contents.items():
            path = self.stage / name
            if name not in there:
                remove(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            elif path.stat().st_size != len(data) or path.read_bytes() != data:
                path.write_bytes(data)
        for path in self.work.iterdir():
            remove(path)

    def check_around(self) -> None:
        """Raise `Escaped` if anything outside the stage and the working directory has changed."""
        if (now := self._list_around()) != self._around:
            changed = sorted(
                name for name in now.keys() | self._around.keys() if now.get(name) != self._around.get(name)
            )
            raise Escaped(f"changed outside of the run: {', '.join(changed[:3])}")

    def _list_around(self) -> dict[str, tuple[int, int]]:
        paths = [self.root, *self.root.iterdir(), *(self.root / "sentinel").rglob("*")]
        inside = (self.stage, self.work)
        return {
            str(path): (0, 0) if path in (self.root, *inside) else (path.stat().st_mtime_ns, path.stat().st_size)
            for path in paths
        }


def make_files(base: Path, model: nn.Module) -> None:
    """Train the small runs and write one file of each kind."""
    common = {"env": "FrozenLake-v1", "rounds": 2, "eval_episodes": 2}
    common |= {"hyperparameters": {"n_steps": 32, "batch_size": 32, "n_epochs": 1}, "policy_kwargs": {"net_arch": [8]}}
    configs = [configure(arm=arm, **common) for arm in ("ppo", "iif")]
    for config in configs:
        path = base / "comparison" / "runs" / config.arm / "seed_0"
        run(config, path, lambda *done: None, recordings=[2])
    shutil.copytree(base / "comparison" / "runs" / "iif" / "seed_0", base / "agent")
    _write_results(base, configs)
    toy = PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    toy.learn(32, callback=InfluenceCallback(IIF(0.5), run=base / "script"))
    write_language_run(base / "language")
    attribute(toy.policy, collect(toy), target=Return()).save(base / "influence.safetensors")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {**checkpoints.read_model(model, optimizer), "kl_coef": 0.1, "generators": read_rng_state()}
    save_tree(base / "checkpoint.safetensors", content)
    (base / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    for name in ("prompts.jsonl", "prompts.json"):
        rows = [json.dumps({"prompt": f"{a} + 1 =", "completion": f" {a + 1}"}) for a in range(4)]
        (base / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write_results(base: Path, configs: list[RunConfig]) -> None:
    """Write what a comparison and a sweep leave of these runs."""
    files = CurveFiles.of_sweep(base / "sweep")
    for config in configs:
        files.write("lake", config.arm, config, RunDirectory.open(base / "comparison" / "runs" / config.arm / "seed_0"))
    summary = summarise_sweep(load_sweep(base / "sweep"))
    documents = {"comparison": [config.to_json() for config in configs], "summary": {configs[0].env: summary["lake"]}}
    for name, content in documents.items():
        (base / "comparison" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    rows = [{"score": "snapshot", "truth": "recorded", "outcome": "target", "lds": 0.5, "low": 0.1, "high": 0.9}]
    for folder in (base / "agent" / "counterfactual", base / "agent" / "phases"):
        folder.mkdir()
    (base / "agent" / "counterfactual" / "round_00002.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")


def write_language_run(path: Path) -> None:
    """Write a language model's run of two rounds."""
    experiment = {"arm": "iif", "seed": 0, "task": "arithmetic", "size": "tiny"}
    config = {"kind": "language", "arm": "iif", "seed": 0, "rounds": 2, "experiment": experiment}
    directory = RunDirectory.create(path, config, versions={"torch": torch.__version__})
    for number in (0, 1, 2):
        texts = [f" {number + row}" for row in range(4)]
        answers = {"prompt": [f"{row} + 1 =" for row in range(4)], "response": texts, "reward": [0.0, 1.0, 0.5, 0.0]}
        directory.write_round("answers", number, pl.DataFrame(answers))
    for number in (1, 2):
        table: dict[str, Any] = {
            "record_id": [4 * number + row for row in range(4)],
            **answers,
            **{"tokens": [2] * 4, "ended": [True] * 4, "divergence": [0.0, 0.1, 0.2, 0.3]},
            **{"advantage": [1.0, -1.0, 0.5, 0.0], "log_prob": [-1.0] * 4},
            **{"prompt_ids": [[1, 2, 3]] * 4, "response_ids": [[4, 5]] * 4},
            **{"token_texts": [[" ", "1"]] * 4, "token_parts": [[0.5, -0.25]] * 4},
            **{"score": [0.25, -0.25, 0.5, -0.5], "keep": [True, False, True, False], "weight": [1.0, 0.0, 1.0, 0.0]},
            "reason": [None, "below 0", None, "below 0"],
        }
        directory.write_round("records", number, pl.DataFrame(table))
        directory.append("metrics", {"round": number, "reward": 0.4, "kept": 2, "records": 4, "negative_share": 0.5})
        directory.append("timings", {"round": number, "collection_cpu": 1.0, "optimisation_cpu": 1.0})


def watch(allowed: Callable[[Path], bool]) -> None:
    """Raise `Escaped` from now on where Python writes outside of what is allowed, unpickles, or starts a process."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn"):
            raise Escaped(f"{event} {values}")
        if event == "open":
            path, mode, flags = values
            wants = any(sign in mode for sign in "wax+") if isinstance(mode, str) else bool(flags & writing)
            if wants and isinstance(path, str | bytes | os.PathLike) and not allowed(Path(os.fsdecode(path))):
                raise Escaped(f"opened for writing: {os.fsdecode(path)}")
        elif event in ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"):
            path = values[1] if event in ("os.rename", "os.symlink", "os.link") else values[0]
            if isinstance(path, str | bytes | os.PathLike) and not allowed(Path(os.fsdecode(path))):
                raise Escaped(f"{event}: {os.fsdecode(path)}")

    sys.addaudithook(audit)
