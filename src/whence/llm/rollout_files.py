"""Rows of rollouts, one a response, from the lines of files as trainers write them.

- TRL (`log_completions=True`): step, prompt, completion, a column for each reward function and each `log_extra`, and
  advantage; no sum of the rewards, of which only TRL knows the weights.
- verl (`trainer.rollout_data_dir`), AReaL, verifiers' results: a rollout a line.
- ms-swift: a list for each column, a line each time it logs.
- open-instruct: token ids alone. NeMo-RL: each value in a list of one, and token ids with masks.
- verifiers and prime-rl (`traces.jsonl`): a line an episode, with a tree of messages for each trace.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

from pyarrow import ArrowException, input_stream, parquet

from whence.core import WhenceError, first_line, require_file

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("prompt", "input", "input_prompt"),
        "response": ("response", "completion", "output", "output_response"),
        "reward": ("reward", "score"),
        "step": ("step", "global_step", "gen_step"),
        "group": ("group", "group_id", "uid", "prompt_idx", "example_id", "task_id"),
        "advantage": ("advantage", "advantages"),
        "prompt_ids": ("prompt_ids", "prompt_tokens"),
        "response_ids": ("response_ids", "response_tokens"),
        "response_mask": ("response_mask",),
        "log_probs": ("rollout_log_probs", "response_logprobs", "logprobs", "log_probs"),
    }
)
"""What is read of a row, and the columns that hold it by the names of trainers, the first one that is there."""

_FILE = re.compile(r".*\.(parquet|(jsonl?|ndjson)(\.(gz|bz2|zst|lz4))?)", re.IGNORECASE)
_DOCUMENT = re.compile(r".*\.json(\.\w+)?", re.IGNORECASE)
_READ_AT_ONCE = 1024
Row = dict[str, Any]


def list_files(path: Path, skipped: Counter[str]) -> list[Path]:
    """Return a file, or the files of rollouts in a folder, in the order of the numbers in their names.

    Of prime-rl's folder those are the traces that were trained on. What is left out is counted in `skipped`: files of
    evaluations, and `.json` next to files of rows, which is a trainer's state or configuration.
    """
    folder = path.parent if path.is_file() else path
    named = [path] if path.is_file() else path.glob("*")
    present = {file for file in named if file.is_file() and _FILE.fullmatch(file.name)}
    files = {file for file in present if not (_DOCUMENT.fullmatch(file.name) or file.stem.endswith("metadata"))}
    files = files or {*filter(Path.is_file, path.glob("step_*/train/effective/traces.jsonl"))} or present
    steps = _list_evaluations(folder)
    trained = {file for file in files if not (file.name.startswith("val_") or _find_number(file) in steps)}
    left_out = {"files of evaluations": files - trained, "files of other JSON": present - files}
    skipped += Counter({what: len(each) for what, each in left_out.items()})
    if not trained:
        raise WhenceError(
            f"{path} holds no rollouts: a Parquet file or one of JSON lines is needed, or a folder of them (*.parquet, "
            "*.jsonl, *.json, *.ndjson; JSON may be compressed: .gz, .bz2, .zst, .lz4)."
        )
    names = {file: str(file.relative_to(folder)) for file in trained}
    return sorted(trained, key=lambda file: ([int(number) for number in re.findall(r"\d+", names[file])], names[file]))


def _list_evaluations(path: Path) -> set[int]:
    """Return the steps whose file of TRL's completions an evaluation has overwritten, as far as checkpoints say."""
    states = [*path.parent.glob("checkpoint-*/trainer_state.json")] if path.name == "completions" else []
    steps = set()
    for state in states:
        try:
            history = json.loads(require_file(state).read_text())["log_history"]
            steps |= {entry["step"] for entry in history if any(name.startswith("eval_") for name in entry)}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return steps


def _find_number(file: Path) -> int | None:
    """Return the step that a file's name says: `completions_00012`, `train_data_step12`."""
    match = re.match(r"(?:completions_|train_data_step)(\d+)\.", file.name)
    return None if match is None else int(match[1])


def read_rows(file: Path, columns: Mapping[str, str], skipped: Counter[str]) -> Iterator[Row]:
    """Yield a file's rows as dicts of what `NAMES` lists, as far as it is there, and `reward.NAME` and `info.NAME`.

    Of `columns` see `read_steps`; `skipped` counts rows that are left out, by the reason. A `WhenceError` names file
    and line of a row that lacks something.
    """
    before: set[Any] = set()
    for place, line in _read_lines(file, skipped):
        where = f"{file}, {place}"
        if not isinstance(line, dict):
            raise WhenceError(f"{where} is a {type(line).__name__}, and a row is an object.")
        try:
            rollouts = _split_line(line, where, skipped)
        except (AttributeError, KeyError, IndexError, TypeError) as other:
            raise WhenceError(f"{where} has another form than its keys say: {first_line(other)}.") from None
        rows = [_name(each, columns, where) for each in rollouts]
        steps = {row.get("step") for row in rows}
        if "completion" in line and isinstance(line.get("step"), list) and steps <= before:
            skipped["rows that the line before has, too"] += len(rows)  # ms-swift logs a batch as often as it likes
            continue
        before = steps
        for row in rows:
            if row.get("response") is None and row.get("response_ids") is None:
                skipped["rows without a response"] += 1
            elif row.get("prompt") is None and row.get("prompt_ids") is None:
                skipped["rows without a prompt"] += 1
            elif not any(row.get("response_mask") or [True]):
                skipped["rows of which no token trained"] += 1
            else:
                row.setdefault("step", _find_number(file))
                yield row


def _read_lines(file: Path, skipped: Counter[str]) -> Iterator[tuple[str, Any]]:
    """Yield the place and the values of each line, or of each row of a Parquet file."""
    kind, place = "JSON lines", 0
    try:
        if file.suffix.lower() == ".parquet":
            kind = "Parquet"
            batches = parquet.ParquetFile(file).iter_batches(_READ_AT_ONCE)
            for row, line in enumerate((line for batch in batches for line in batch.to_pylist()), 1):
                yield f"row {row}", {name: _drop_nulls(value) for name, value in line.items()}
            return
        with TextIOWrapper(input_stream(file), encoding="utf-8-sig") as lines:
            for place, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                try:
                    line = _parse(text)
                except ValueError:
                    if place == 1:
                        line = _parse(text + lines.read())  # a document of several lines
                    elif text.endswith("\n"):
                        raise
                    else:
                        skipped["last lines that break off"] += 1
                        return
                for each in line if isinstance(line, list) else [line]:
                    yield f"line {place}", each
    except (OSError, EOFError, ArrowException, ValueError, RecursionError) as broken:
        at = f"line {place}: " if place else ""
        raise WhenceError(f"{file} cannot be read as {kind}: {at}{first_line(broken)}. Mend or remove it.") from None


def _parse(text: str) -> Any:
    """Return what JSON says, without the halves of characters that it can hold and tables cannot."""
    value = json.loads(text)
    if re.search(r"\\u[dD]", text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _drop_nulls(value: Any) -> Any:
    """Return a value of Parquet without the keys that other rows brought into it, as nulls."""
    if isinstance(value, list):
        return [_drop_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _drop_nulls(each) for name, each in value.items() if each is not None}
    return value


def _split_line(line: Row, where: str, skipped: Counter[str]) -> list[Row]:
    """Return the rollouts of a line, which is one, an episode, or a table."""
    if "traces" in line or "nodes" in line:
        return _read_traces(line, skipped)
    if "content" in line and "rewards" in line:
        return [_unwrap(line, where)]
    if all(_is_list_of(line.get(name), str | None) for name in ("prompt", "completion")):
        size = len(line["completion"])
        columns = {name: isinstance(values, list) and len(values) == size for name, values in line.items()}
        return [
            {name: line[name][row] if is_list else line[name] for name, is_list in columns.items()}
            for row in range(size)
        ]
    if (line.get("request_info") or {}).get("num_calls"):
        skipped["rows with the output of tools among their tokens, without a mask"] += 1
        return []
    return [line]


def _is_list_of(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, kind) for each in value)


def _read_traces(episode: Row, skipped: Counter[str]) -> list[Row]:
    """Return the branches of an episode's traces as rollouts: the paths from a root of the tree to its leaves."""
    work = (episode.get("run") or {}).get("work") or {}
    group = (episode.get("group") or {}).get("id") or episode.get("group_id") or (episode.get("task") or {}).get("key")
    rows = []
    traces = episode.get("traces", [episode])
    for trace in traces:
        if not (trace.get("agent") or {}).get("trainable", True):
            skipped["traces of agents that do not train"] += 1
            continue
        nodes, scores = trace.get("nodes") or [], (trace.get("rewards") or {})
        rewards = {name: each["score"] for name, each in scores.items() if each.get("score") is not None}
        about = {"group": group, "step": work.get("step"), **{f"reward.{name}": r for name, r in rewards.items()}}
        if rewards:
            about["reward"] = sum(scores[name].get("weight", 1.0) * reward for name, reward in rewards.items())
        for leaf in sorted({*range(len(nodes))} - {node.get("parent") for node in nodes}):
            path = [leaf]
            while (parent := nodes[path[-1]].get("parent")) is not None:
                if not 0 <= parent < path[-1]:  # a message follows its parent, so no path is endless
                    raise IndexError(f"message {path[-1]} has the parent {parent}")
                path.append(parent)
            rows.append({**about, **_read_branch([nodes[place] for place in reversed(path)])})
    if not rows:
        skipped["episodes without a rollout"] += 1
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _read_branch(nodes: Sequence[Row]) -> Row:
    """Return a path of messages as prompt and response, which begins with the first message that the model wrote."""
    start = next((place for place, node in enumerate(nodes) if node.get("sampled")), len(nodes))
    messages = [node["message"] for node in nodes]
    row: Row = {"prompt": messages[:start], "response": messages[start:] or None}
    ids = [token for node in nodes for token in node.get("token_ids") or []]
    mask = [bool(each) for node in nodes for each in node.get("mask") or []]
    if ids and len(mask) == len(ids):
        row |= _split_tokens(ids, mask)
        advantages = [each for node in nodes for each in node.get("advantages") or []]
        row["advantage"] = advantages or None
    return row


def _split_tokens(ids: Sequence[int], mask: Sequence[bool]) -> Row:
    """Return the tokens before the first one that trains as the prompt's, and the others up to the last that does."""
    if True not in mask:
        return {"response_mask": [False]}
    first, last = mask.index(True), len(mask) - mask[::-1].index(True)
    return {"prompt_ids": ids[:first], "response_ids": ids[first:last], "response_mask": mask[first:last]}


def _unwrap(line: Row, where: str) -> Row:
    """Return a line of NeMo-RL, whose values are lists of one, as a rollout."""
    row = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in line.items()}
    texts, ids = row.pop("content"), row.pop("token_ids", None)
    row |= {"reward": row.pop("rewards"), "prompt": texts[0], "response": "".join(texts[1:])}
    if ids is None:
        if not _is_list_of(texts, str) or len(texts) != 2:
            raise WhenceError(f"{where} has neither a prompt and a response nor token ids, so no role is known.")
        return row
    length = int(row.pop("input_lengths", len(ids)))
    trains = [bool(each and row.get("sample_loss_mask", 1)) for each in row.pop("token_loss_mask")[:length]]
    if isinstance(row.get("advantages"), list):
        row["advantages"] = [each for each, counts in zip(row["advantages"], trains, strict=False) if counts]
    return row | _split_tokens(ids[:length], trains)


def _name(line: Row, columns: Mapping[str, str], where: str) -> Row:
    """Return a rollout with the names of `NAMES`, `reward.NAME` and `info.NAME`."""
    usual = {name: next((each for each in names if each in line), None) for name, names in NAMES.items()}
    log_probs, tokens = (line.get(usual[name] or "") for name in ("log_probs", "response_ids"))
    if not _is_list_of(log_probs, int | float | None) or len(log_probs or ()) != len(tokens or ()):
        usual["log_probs"] = None  # of another form, as with the likeliest tokens of each place
    sources = {name: source for name, source in {**usual, **columns}.items() if source is not None}
    reward = sources.pop("reward", None)
    for name in ("prompt", "response"):
        if name not in sources and f"{name}_ids" not in sources:
            sources[name] = " or ".join(NAMES[name])
    for name, source in sources.items():
        if source not in line:
            raise WhenceError(_explain_missing(name, source, line, where))
    if reward is None:
        # One that does not apply to a row is null there, and the others are not its only one.
        numbers = [n for n, v in line.items() if n not in sources.values() and isinstance(v, int | float | None)]
        if "advantage" not in sources:
            raise WhenceError(
                f"{where} has no reward: name its column, or the sum of several with their weights, as in --column "
                f"'reward={' + 0.5 * '.join(numbers[:2]) or 'NAME'}'. It has: {', '.join(line)}."
            )
        functions = [name for name in numbers if not isinstance(line[name], bool)]
        reward = functions[0] if len(functions) == 1 else None  # TRL's only reward function
    row = {name: _check_value(name, line[source], where) for name, source in sources.items()}
    ids = row.get("response_ids")
    for name in ("response_mask", "log_probs"):
        if (values := row.get(name)) and ids and len(values) != len(ids):
            raise WhenceError(f"{where}: {len(values)} values of {name} are for {len(ids)} tokens; as many are needed.")
    weights = {} if reward is None else _read_sum(reward, line, where)
    parts = {name: _read_number(name, line[name], where) for name in weights}
    if parts:
        known = [weights[name] * value for name, value in parts.items() if value is not None]
        row["reward"] = sum(known) if known else None
    for name, value in line.items():
        if name.startswith("reward.") and name not in parts:
            row[name] = _read_number(name, value, where)
        elif name in parts and len(parts) > 1:
            row[f"reward.{name}"] = parts[name]
        elif name not in parts and name not in sources.values():
            row[f"info.{name}"] = value
    return row


def _explain_missing(name: str, source: str, line: Row, where: str) -> str:
    return (
        f"{where} has no column {source!r} for the {name}; it has: {', '.join(line)}. Name the right one: --column "
        f"{name}=NAME."
    )


def _read_sum(text: str, line: Row, where: str) -> dict[str, float]:
    """Return the weight of each column of a sum such as `accuracy + 0.1 * length`; a column's own name comes first."""
    if text in line:
        return {text: 1.0}
    weights = dict[str, float]()
    for part in text.split("+"):
        weight, _, name = part.rpartition("*")
        if name.strip() not in line:
            raise WhenceError(_explain_missing("reward", name.strip(), line, where))
        try:
            weights[name.strip()] = weights.get(name.strip(), 0.0) + float(weight or 1)
        except ValueError:
            raise WhenceError(f"reward={text!r} has the weight {weight.strip()!r}; a number is needed.") from None
    return weights


def _check_value(name: str, value: Any, where: str) -> Any:
    """Return a value as rows hold it, or refuse it."""
    if value is None or (name in ("prompt", "response") and value == []):
        return None
    if name in ("prompt", "response") and not isinstance(value, str) and not _is_list_of(value, dict):
        raise WhenceError(
            f"{where}: the {name} is {_shorten(value)}; a text or the messages of a chat are needed. Name another "
            f"column: --column {name}=NAME."
        )
    if name == "advantage":
        numbers = {_read_number(name, each, where) for each in (value if isinstance(value, list) else [value])}
        if len(numbers) > 1:
            raise WhenceError(f"{where}: the advantages of its tokens differ; one for each response is needed.")
        return next(iter(numbers), None)
    if name == "step":
        try:
            if 0 <= (step := int(value)) < 2**53 and step == float(value):
                return step
        except (TypeError, ValueError, OverflowError):
            pass
        raise WhenceError(f"{where}: the step is {_shorten(value)}; a whole number from 0 is needed.")
    if name == "log_probs" and not _is_list_of(value, int | float | None):
        raise WhenceError(f"{where}: {name} is {_shorten(value)}; a list of numbers is needed.")
    if name.endswith(("ids", "mask")):
        if not isinstance(value, list) or any(not isinstance(each, int) or not 0 <= each < 2**31 for each in value):
            raise WhenceError(f"{where}: {name} is {_shorten(value)}; a list of whole numbers from 0 is needed.")
        return list(map(bool, value)) if name.endswith("mask") else value
    return value


def _read_number(name: str, value: Any, where: str) -> float | None:
    """Return a number; None: there is none, or none that is finite."""
    if value is not None and not isinstance(value, int | float):
        raise WhenceError(
            f"{where}: {name} is {_shorten(value)}; a number is needed. Name the column that has it: --column "
            "reward=NAME."
        )
    try:
        return float(value) if value is not None and math.isfinite(value) else None
    except OverflowError:
        return None


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"
