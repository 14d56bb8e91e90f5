"""Every reader of the library, each with a function that damages its input and reads it."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import polars as pl
import torch
from safetensors.torch import save

from benchmarks.fuzz_bench import Bench
from benchmarks.fuzz_commands import RUNS, Finding, damage_run, read_by_command, read_command_line
from benchmarks.fuzz_damage import (
    HOSTILE,
    MARKUP,
    NAMES,
    damage_table,
    damage_toml,
    damage_value,
    draw_text,
    draw_toml,
    draw_value,
)
from benchmarks.fuzz_tensors import damage_safetensors
from whence import Influence, RecordBatch, RoundRecording, RunDirectory, WhenceError
from whence.advice import give_advice
from whence.cli.console import parse_json, parse_json_object
from whence.cli.options import parse_action, parse_rounds
from whence.cli.settings import collect_overrides
from whence.experiments import LanguageConfig, RunConfig, load_comparison, load_sweep, read_sweep
from whence.experiments.kinds import read_config
from whence.experiments.llm.loading import load_data, load_function
from whence.experiments.rl.presets import presets
from whence.experiments.rl.stored import load_model, read_run_config
from whence.llm.base.value_head import VALUE_HEAD, WithValueHead
from whence.llm.ppo import ppo_run as checkpoints
from whence.llm.text.prompts import list_columns
from whence.moments import By, find_moment, find_moments, group_scores, read_axes
from whence.page import write_report, write_run_report
from whence.page.explorer import ExploredRun, build_detail, build_round, describe_runs, query_records
from whence.runs import PerRound, Table
from whence.runs.checkpoints import load_tree
from whence.tables import read_weights

Read = Callable[[Bench, random.Random], None]
"""Damages an input and reads it; any error but whence's own is a finding."""


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a reader returns; whence's own errors are what is expected, if they say something."""
    try:
        return call()
    except WhenceError as refusal:
        if len(str(refusal)) < 20:
            raise Finding(f"an error that says nothing: {refusal!r}") from refusal
        return None


def read_config_json(bench: Bench, rng: random.Random) -> None:
    """A run's config.json: the run, its configuration and its environment."""
    name = rng.choice(RUNS)
    bench.damage(f"{name}/config.json", rng)
    directory = attempt(lambda: RunDirectory.open(bench.stage / name))
    if directory is not None:
        attempt(lambda: directory.check_same({"env": "FrozenLake-v1", "rounds": 2}))
        attempt(lambda: read_run_config(directory))
        attempt(lambda: describe_runs([ExploredRun(bench.stage / name)], mode="served"))


def read_tables(bench: Bench, rng: random.Random) -> None:
    """The tables of a run, of all rounds and of one."""
    name = rng.choice(bench.files(*(f"{run}/" for run in RUNS)))
    if not name.endswith(".parquet"):
        return read_tables(bench, rng)
    bench.damage(name, rng)
    directory = RunDirectory.open(bench.stage / name.split("/")[0])
    for table in get_args(Table):
        attempt(lambda table=table: directory.table(table))
    for table in get_args(PerRound):
        attempt(lambda table=table: directory.round(table, 2))
        attempt(lambda table=table: directory.round(table, rng.choice((1, 0, -1, 10**12))))
    attempt(lambda: give_advice(directory.table("metrics"), directory.config))
    attempt(lambda: RecordBatch.from_polars(directory.round("records", 1)))
    attempt(lambda: read_weights(directory.round("records", 1)))
    return None


def read_policy(bench: Bench, rng: random.Random) -> None:
    """A policy's tensors, and the model that they belong to."""
    bench.damage(rng.choice(bench.files("agent/policies", "script/policies")), rng)
    for name in ("agent", "script"):
        directory = RunDirectory.open(bench.stage / name)
        for number in directory.policies()[:2]:
            attempt(lambda directory=directory, number=number: directory.policy(number))
    if rng.random() < 0.1:
        attempt(lambda: load_model(RunDirectory.open(bench.stage / "agent"), 1))


def read_model(bench: Bench, rng: random.Random) -> None:
    """A model built again from a damaged configuration."""
    name = rng.choice(("agent", "script"))
    document = json.loads(bench.read_whole(f"{name}/config.json"))
    document["config"] = damage_value(document["config"], rng, 1)
    (bench.stage / name / "config.json").write_text(json.dumps(document), encoding="utf-8")
    attempt(lambda: load_model(RunDirectory.open(bench.stage / name), 1))


def read_moments(bench: Bench, rng: random.Random) -> None:
    """Moments and groups of a table that is not what a run stores."""
    name = rng.choice(bench.files("agent/records", "script/records", "language/records"))
    table = damage_table(pl.read_parquet(bench.read_whole(name)), rng)
    record = rng.choice((0, 1, 33, 5, -1, 2**63))
    attempt(lambda: find_moments(table, lowest=rng.random() < 0.5, most=rng.choice((0, 1, 5, 10**9))))
    attempt(lambda: find_moment(table, record))
    attempt(lambda: read_axes(table, rng.choice((None, ["x"], list(HOSTILE)))))
    for by in (*get_args(By), draw_text(rng)):
        attempt(lambda by=by: group_scores(table, by))


def read_recording(bench: Bench, rng: random.Random) -> None:
    """A recorded round."""
    name = "agent/recordings/round_00002.safetensors"
    bench.damage(name, rng)
    attempt(lambda: repr(RoundRecording.load(bench.stage / name)))


def read_influence(bench: Bench, rng: random.Random) -> None:
    """Stored scores."""
    bench.damage("influence.safetensors", rng)
    influence = attempt(lambda: Influence.load(bench.stage / "influence.safetensors"))
    if influence is not None:
        attempt(lambda: (influence.to_polars(), influence.bottom(3), repr(influence), influence._repr_html_()))
        attempt(lambda: influence.is_significant())


def _load_checkpoint(model: torch.nn.Module, optimizer: Any, content: Mapping[str, Any], path: Path) -> None:
    checkpoints.check_model(model, content, path)
    checkpoints.load_model(model, optimizer, content)


def read_checkpoint(bench: Bench, rng: random.Random) -> None:
    """A language model's checkpoint, and a value head."""
    if rng.random() < 0.7:
        bench.damage("checkpoint.safetensors", rng)
        optimizer = torch.optim.Adam(bench.model.parameters())
        path = bench.stage / "checkpoint.safetensors"
        content = attempt(lambda: load_tree(path))
        if content is not None:
            attempt(lambda: _load_checkpoint(bench.model, optimizer, content, path))
        return
    holder = WithValueHead.__new__(WithValueHead)
    torch.nn.Module.__init__(holder)
    holder.value_head = torch.nn.Linear(3, 1)
    data = bytes(save(holder.value_head.state_dict(), {"format": "pt"}))
    (bench.work / VALUE_HEAD).write_bytes(damage_safetensors(data, rng))
    attempt(lambda: holder.load_value_head(bench.work))


def read_page_data(bench: Bench, rng: random.Random) -> None:
    """The data of a run's page: rounds, records, details."""
    name = damage_run(bench, rng)
    run = attempt(lambda: ExploredRun(bench.stage / name))
    if run is None:
        return
    number, record = rng.choice((1, 2, 2, 3)), rng.choice((0, 5, 33, 40))
    check_json(attempt(lambda: build_round(run, number, rows=True)))
    check_json(attempt(lambda: build_detail(run, number, record, continuations=0)))
    settings = {"page": rng.choice((1, 1, 0, 2, 10**12)), "size": rng.choice((50, 1, 0, 10**9))}
    settings |= {"sort": rng.choice((None, *NAMES, draw_text(rng))), "search": rng.choice(("", "a", draw_text(rng)))}
    filters = [(rng.choice((*NAMES, draw_text(rng))), rng.choice((">0", "<=1e400", "= x", "kept", draw_text(rng))))]
    check_json(attempt(lambda: query_records(run, number, filters=filters[: rng.randrange(2)], **settings)))


def check_json(value: Any) -> None:
    """Refuse page data that is no JSON: the server sends it so."""
    json.dumps(value, allow_nan=False).encode("utf-8", "replace")


def read_page(bench: Bench, rng: random.Random) -> None:
    """A run's page, or a comparison's, as a file."""
    page = bench.work / "page.html"
    if rng.random() < 0.7:
        name = damage_run(bench, rng)
        done = attempt(lambda: write_run_report(ExploredRun(bench.stage / name), page, rounds=[2]) or True)
    else:
        bench.damage(rng.choice(bench.files("comparison/")), rng)
        done = attempt(lambda: write_report(load_comparison(bench.stage / "comparison"), page, rounds=[2]) or True)
    if done and page.exists() and MARKUP in page.read_text(encoding="utf-8", errors="replace"):
        raise Finding("markup of a run's text stands in the page")


def read_comparison(bench: Bench, rng: random.Random) -> None:
    """The lists and figures of a comparison."""
    bench.damage(f"comparison/{rng.choice(('comparison', 'summary'))}.json", rng)
    attempt(lambda: load_comparison(bench.stage / "comparison").table("metrics"))


def read_results(bench: Bench, rng: random.Random) -> None:
    """The stored results of a sweep."""
    bench.damage(rng.choice(bench.files("sweep/")), rng)
    attempt(lambda: load_sweep(bench.stage / "sweep"))


def read_sweep_file(bench: Bench, rng: random.Random) -> None:
    """A sweep's file."""
    path = bench.work / "sweep.toml"
    path.write_bytes(damage_toml(bench.read_whole("sweep.toml").decode(), rng))
    attempt(lambda: read_sweep(path))


def read_run_configs(bench: Bench, rng: random.Random) -> None:
    """Configurations of agents' runs, from JSON."""
    values = json.loads(bench.read_whole(f"comparison/runs/{rng.choice(('ppo', 'iif'))}/seed_0/config.json"))["config"]
    if rng.random() < 0.3:
        preset = presets()[rng.choice(list(presets()))]
        values = {"arm": "iif", "seed": 0} | {key: value for key, value in preset.items() if key != "base"}
    damaged = damage_value(values, rng)
    config = attempt(lambda: RunConfig.from_json(damaged))
    if (
        config is not None
        and RunConfig.from_json(json.loads(json.dumps(config.to_json()))).to_json() != config.to_json()
    ):
        raise Finding("a configuration that is not what it was written as")
    attempt(lambda: read_config(damaged))


_LANGUAGE: Sequence[Mapping[str, Any]] = (
    {"arm": "iif", "seed": 0, "task": "arithmetic", "size": "tiny", "settings": {"rounds": 2, "batch_size": 8}},
    {"arm": "iif-token", "seed": 1, "task": None, "model": "m", "dataset": "d", "reward": "r.py:f", "lora": 4},
    {"arm": "ppo", "seed": 2, "task": "civility", "algorithm": "grpo", "settings": {"beta": 0.1}, "samples": 2},
)


def read_language_configs(bench: Bench, rng: random.Random) -> None:
    """Configurations of language models' runs, from JSON."""
    values = damage_value({**LanguageConfig.from_json(rng.choice(_LANGUAGE)).to_json()}, rng)
    config = attempt(lambda: LanguageConfig.from_json(values))
    if config is not None:
        attempt(lambda: (config.rounds, config.target, config.env, config.all_settings, config.make_rule()))


_KEYS = (
    "rounds",
    "hyperparameters.n_steps",
    "env_kwargs.map_name",
    "policy_kwargs.net_arch",
    "device",
    "observe",
    "warmup",
)


def read_set(bench: Bench, rng: random.Random) -> None:
    """Texts of --set."""
    texts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice((*_KEYS, draw_text(rng), "a." * rng.choice((2, 500)) + "b", "hyperparameters.learning_rate"))
        value = rng.choice((draw_toml(rng), draw_toml(rng), draw_text(rng)))
        texts.append(
            rng.choice((f"{key}={value}", f"{key}={value}", key, f"{key} == {value}", f"={value}", draw_text(rng)))
        )
    preset = rng.choice((None, *presets(), draw_text(rng)))
    attempt(lambda: collect_overrides(texts, preset, {"hyperparameters": {"gamma": 0.9}}))


def read_options(bench: Bench, rng: random.Random) -> None:
    """JSON of options, lists of rounds, targets."""
    text = json.dumps(draw_value(rng))
    text = rng.choice(
        (text, text[: rng.randrange(len(text) + 1)], draw_text(rng), "[" * 100_000, "9" * 5000, '{"a":' * 9999)
    )
    attempt(lambda: parse_json("--x", text, "1"))
    attempt(lambda: parse_json_object("--x", text, "{}"))
    attempt(lambda: parse_action(text, rng.choice((None, text))))
    parts = ("1", "5,20", "10-50", "10-150:10", "0", "-1", "3-1", "1-999999", "1:2", "1-5:0", "٣", "1e3", ",", "9" * 30)
    rounds = ",".join(rng.choice((*parts, draw_text(rng))) for _ in range(rng.choice((1, 1, 2, 4))))
    attempt(lambda: parse_rounds("--rounds", rounds))


def read_names(bench: Bench, rng: random.Random) -> None:
    """Names of functions; no function that is named exists, so nothing runs."""
    source = rng.choice(("absent.py", "absent_module", "absent.module", "", ".", "..", "a/../b.py", draw_text(rng)))
    if re.fullmatch(r"[A-Za-z_.]+", source) and not source.startswith(("absent", ".")):
        source = "absent_module"
    name = rng.choice((f"{source}:f", source, f"{source}:", f":{source}", f"{source}.py:{draw_text(rng)}"))
    attempt(lambda: load_function(name))


def read_prompts(bench: Bench, rng: random.Random) -> None:
    """Files of prompts and demonstrations."""
    name = rng.choice(("prompts.jsonl", "prompts.json"))
    bench.damage(name, rng)
    data = attempt(lambda: load_data(str(bench.stage / name)))
    if data is not None:
        attempt(lambda: list_columns(data))


READERS: dict[str, tuple[float, Read]] = {
    "config.json": (14, read_config_json),
    "tables": (8, read_tables),
    "policies": (8, read_policy),
    "models": (1, read_model),
    "moments": (8, read_moments),
    "recordings": (6, read_recording),
    "scores": (6, read_influence),
    "checkpoints": (6, read_checkpoint),
    "page data": (3, read_page_data),
    "pages": (0.5, read_page),
    "comparisons": (5, read_comparison),
    "sweeps' results": (5, read_results),
    "sweep files": (4, read_sweep_file),
    "agents' settings": (10, read_run_configs),
    "language models' settings": (8, read_language_configs),
    "--set": (8, read_set),
    "JSON and rounds of options": (8, read_options),
    "names of functions": (3, read_names),
    "prompts": (0.3, read_prompts),
    "commands on damaged runs": (2, read_by_command),
    "command lines": (5, read_command_line),
}
"""For each reader: its part of all inputs, and its function."""
