"""What the commands print for scripts: which keys, of which types, in which version of the form."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.language_training import make_model, make_tokenizer
from helpers.launching import run_one_by_one
from whence import cli
from whence.cli.app import COMMANDS, LLM_COMMANDS, load_command
from whence.cli.terminal.console import SCHEMA
from whence.findings import Check, Finding

FILE = Path(__file__).parent / "json_keys.json"

NAMED = {
    *("list: arms", "list: arms of language models", "list: presets", "list: engines", "list: targets"),
    *(f"{name}: {place}" for name in ("compare", "llm compare") for place in ("environments", "environments.*")),
    *(f"{name}: environments.*.*" for name in ("compare", "llm compare")),
    *("table: experiments", "table: experiments.*", "table: experiments.*.*", "sweep: failures"),
    *("prove: stored", "prove: verdicts", "show: moment.window"),
}
"""Objects whose keys are names: of arms, environments, metrics or outcomes."""

DESCRIBED_ELSEWHERE = {f"{name}: {place}" for name in ("train", "llm train") for place in ("config", "last_round")}
DESCRIBED_ELSEWHERE |= {"diff: differences[].a", "diff: differences[].b"}
"""What is copied from a run's files, which have a version of their own."""

AGENT = "CartPole-v1 --rounds 2 --n-steps 128 --n-epochs 1 --eval-episodes 2"
SMALL = "--arms ppo,iif --seeds 1 --rounds 1 --n-steps 64 --n-epochs 1 --eval-episodes 2 --workers 1"
TINY = '--size tiny --settings \'{"rounds": 1, "batch_size": 8, "mini_batch_size": 4, "save_every": 1}\''
LINES = {
    "train": f"train {AGENT} --run agent",
    "compare": f"compare FrozenLake-v1 {SMALL} --out compared",
    "sweep": "sweep sweep.toml --workers 1 --out swept",
    "table": "table swept",
    "attribute": "attribute agent --round 1 --top 2",
    "show": "show agent --bottom 2 --continuations 2 --out moment.png",
    "import": "import rollouts.npz --out imported",
    "findings": "findings agent",
    "diff": "diff agent imported",
    "audit": "audit CartPole-v1",
    "why": "why agent --episode-seed 0 --step 1 --top 2 --out why.png",
    "view": "view agent --no-browser",
    "report": "report agent --rounds 1",
    "list": "list",
    "prove": "prove agent --where 'action = 1 and step < 5' --seeds 2 --test-episodes 2",
    "again": "again plain --from 1 --rounds 1 --seeds 1",
    "llm train": f"llm train {TINY} --run language",
    "llm compare": f"llm compare {TINY} --arms none,iif-sequence --seeds 1 --workers 1 --out answers",
    "llm score": "llm score rollouts --model model --run scored",
    "show, of responses": "show language --bottom 2",
    "why, of a response": "why language --prompt 1+1? --response 2; --top 2 --by bm25",
    "why, of a score": "why scored --round 1 --record 0",
}
"""A command for each form, in the order in which they are given."""

SWEEP = """
[[experiment]]
name = "lake"
env = "FrozenLake-v1"
arms = ["ppo", "iif"]
seeds = 1
rounds = 1
eval_episodes = 2
hyperparameters = { n_steps = 64, n_epochs = 1 }
"""

FINDINGS = [
    Check("pace", "wrong", "larger", Finding("reward", "It is odd", "Seen.", "Look.", "wrong", 0.001, 3, (7, 8))),
    Check("ends", "unusual", "larger", Finding("episode", "It ends", "Seen.", "Look.", "unusual")),
    Check("copies", "fine", "nothing is seen"),
]


def outline(value: Any, path: str) -> dict[str, set[str]]:
    """Return the types of all values in JSON by their paths, such as `findings: findings[].rank`; `*` is any name."""
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", int: "number", float: "number"}
    seen = {path: set() if value is None else {kinds[type(value)]}}
    children: list[tuple[str, Any]] = []
    if isinstance(value, list):
        children = [(f"{path}[]", each) for each in value]
    elif isinstance(value, dict) and path not in DESCRIBED_ELSEWHERE:
        before = f"{path} " if path.endswith(":") else f"{path}."
        children = [(before + ("*" if path in NAMED else key), each) for key, each in value.items()]
    for place, each in children:
        for inner, types in outline(each, place).items():
            seen[inner] = seen.get(inner, set()) | types
    return seen


def write_sources(folder: Path) -> None:
    """Write what the commands read: a sweep's file, rollouts, and the model that they are scored at."""
    (folder / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    (folder / "rollouts").mkdir()
    rows = [{"prompt": "ab", "response": text, "reward": len(text), "step": 1} for text in ("cde", "a")]
    (folder / "rollouts" / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arrays = {"obs": np.zeros((4, 1)), "act": np.zeros(4, int), "rew": np.zeros(4), "dones": np.zeros(4), "note": 0}
    np.savez(folder / "rollouts.npz", **arrays)
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, laboratory_cache: None) -> dict[str, str]:
    """Give every command of `LINES` with --json, and return what each prints."""
    folder = tmp_path_factory.mktemp("json")
    write_sources(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("whence.lab.cluster.run_all", run_one_by_one)
        patch.setattr("whence.page.server.serve", lambda runs, *, on_start, **_: on_start("http://127.0.0.1:8787/"))
        patch.setattr("whence.cli.commands.findings_command.inspect", lambda run: FINDINGS)
        patch.setattr("whence.cli.commands.audit_command.check_environment", lambda make, **_: FINDINGS)
        texts = {}
        CliRunner().invoke(cli.app, shlex.split(f"train {AGENT} --selection ppo --run plain"))
        for name, line in LINES.items():
            done = CliRunner().invoke(cli.app, [*shlex.split(line), "--json"])
            assert done.exit_code == 0, (line, done.output, done.exception)
            texts[name] = done.stdout
    return texts


def describe(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the types of what commands print, by command and path; "null" where nothing else is seen."""
    keys = {}
    for name, text in texts.items():
        seen = outline(json.loads(text), f"{name}:")
        del seen[f"{name}:"]
        keys[name] = {place.partition(": ")[2]: " or ".join(sorted(types)) or "null" for place, types in seen.items()}
    return keys


def test_every_command_has_json() -> None:
    names = {*COMMANDS, *(f"llm {name}" for name in LLM_COMMANDS)}
    assert names == {name for name in LINES if "," not in name}
    for name in names:
        place = LLM_COMMANDS[name[4:]] if name.startswith("llm ") else COMMANDS[name]
        assert any("--json" in option.opts for option in load_command(name, place).params), name


@pytest.mark.timeout(300)
def test_a_key_is_removed_or_renamed_only_in_a_new_version(printed: dict[str, str], tmp_path: Path) -> None:
    now = {"schema": SCHEMA, "commands": describe(printed)}
    (tmp_path / FILE.name).write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    hint = f"What --json prints now is in {tmp_path / FILE.name}: copy it to {FILE}"
    assert stored["schema"] == SCHEMA, f"SCHEMA is raised. {hint}."
    before, after = (
        {(name, place): kind for name, keys in each["commands"].items() for place, kind in keys.items()}
        for each in (stored, now)
    )
    gone = [" ".join(key) for key in before if key not in after]
    assert not gone, f"Keys are gone: {gone}. Raise SCHEMA in whence/cli/terminal/console.py. {hint}."
    changed = [
        f"{' '.join(key)}: {kind}, now {after[key]}"
        for key, kind in before.items()
        if "null" not in (kind, after[key]) and kind != after[key]
    ]
    assert not changed, f"Types have changed: {changed}. Raise SCHEMA in whence/cli/terminal/console.py. {hint}."
    new = [" ".join(key) for key in after if key not in before]
    assert not new, f"Keys are new: {new}. SCHEMA stays. {hint}."


def test_all_have_the_version_first(printed: dict[str, str]) -> None:
    for name, text in printed.items():
        assert next(iter(json.loads(text).items())) == ("schema", SCHEMA), name


def test_a_server_prints_one_line_and_goes_on(printed: dict[str, str]) -> None:
    (line,) = printed["view"].splitlines()
    expected = {"schema": SCHEMA, "url": "http://127.0.0.1:8787/", "port": 8787, "runs": ["agent"]}
    assert json.loads(line) == expected


def test_scored_rollouts_are_counted(printed: dict[str, str]) -> None:
    content = json.loads(printed["llm score"])
    assert content == {"schema": SCHEMA, "run": "scored", "target": "sequence", "rounds": 1, "rows": 2}
