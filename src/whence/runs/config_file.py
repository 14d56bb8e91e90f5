"""The config.json of run directories: read, compared, and signed; and by it, what a directory holds.

By signatures the runs are known that this user made on this machine.
"""

import ast
import hmac
import json
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, TypeAlias

from platformdirs import user_state_path

from whence.core import RunDirectoryError, parse_document, require_file, show, suggest, write_atomically
from whence.runs.files import check_links, is_empty

POLICIES_EVERY = "policies_every"
"""The note that says how many rounds lie between the policies that a run keeps; missing: it keeps them all."""

REPLACING = "replacing"
"""The note of a run in whose place another one is being put; killed meanwhile, the next start does the rest."""

FORMAT = "whence-run"
"""The mark of a run's config.json."""

VERSION, OLDER = 3, 2
"""Of a run's config.json, and the one before, which is read, too."""

SIGNATURE = ".signature"
"""The file of a run's signature, which is no part of what the run is."""

_KEY_BYTES = 32  # the length of the key, and of what HMAC-SHA256 returns

_REFUSED: set[Path] = set()
"""Keys that could not be had, which is said once of each."""

log = logging.getLogger("whence")

Content: TypeAlias = Literal["run", "comparison", "sweep"]


def check_config_file(path: Path) -> dict[str, Any]:
    """Return the document of a config.json, of any version; a `RunDirectoryError` if it is none of whence's."""
    try:
        text = require_file(path).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RunDirectoryError(explain_no_run(path.parent)) from None
    except OSError as broken:
        raise RunDirectoryError(f"{path} cannot be read: {broken}. Restore it, or run into a new directory.") from None
    try:
        document = parse_document(path, text, RunDirectoryError)
    except RunDirectoryError as damage:
        raise RunDirectoryError(f"{damage} Or run into a new directory.") from None
    if (mark := document.get("format")) != FORMAT:
        raise RunDirectoryError(
            f"{path} is marked {mark!r}, and a run's config.json {FORMAT!r}: {path.parent} is no run directory. Choose "
            "another one."
        )
    return document


def read_config_file(path: Path) -> dict[str, dict[str, Any]]:
    """Read a config.json, of this version or the one before: its objects `config`, `versions` and `notes`."""
    document = check_config_file(path)
    parts, version = {name: document.get(name, {}) for name in ("config", "versions", "notes")}, document.get("version")
    if version not in (OLDER, VERSION) or not all(isinstance(part, dict) for part in parts.values()):
        raise RunDirectoryError(
            f"{path} is marked as version {version!r}; this version of whence reads {FORMAT!r}, versions {OLDER} and "
            f"{VERSION}. Read it with the version that wrote it, or run again into a new directory."
        )
    if version == OLDER:
        parts["config"] |= {name: _read_call(parts["config"].get(name), name) for name in _CALLS & {*parts["config"]}}
    return parts


_CALLS = {"rule", "target", "objective"}
"""What version 2 stored as the text of a call, such as IIF(drop=0.25)."""


def _read_call(text: Any, name: str) -> Any:
    """Return the settings of a call as version 3 stores them: None of the model's objective, else the text."""
    try:
        call = ast.parse(str(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None if name == "objective" else text
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
        return text
    settings = {
        each.arg: each.value.value for each in call.keywords if each.arg and isinstance(each.value, ast.Constant)
    }
    return {name: call.func.id, **settings} if len(settings) == len(call.keywords) else text


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()) -> list[str]:
    """List, for people, the settings in which two configurations differ, but those named `outer.inner` in `but`.

    An empty table of settings and a value of None are settings that are not there. New digests under `contents` are no
    changes: an older run has none, and rollouts may be added.
    """
    stored = _flatten_settings(before)
    return [
        f"{name} was {_show_setting(old)}, now {_show_setting(new)}"
        for name, (old, new) in find_changes(before, now).items()
        if name not in but and (name in stored or not name.startswith("contents."))
    ]


def _show_setting(value: Any) -> str:
    return "not set" if value is None else repr(show(value))


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two configurations differ, under names such as `outer.inner`; None is not set."""
    old, new = _flatten_settings(before), _flatten_settings(now)
    names = sorted(old.keys() | new.keys())
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str]) -> None:
    """Refuse to continue the run in a directory in another configuration; see `list_changes`."""
    if changes := list_changes(before, now, but=but):
        rest = [f"and {len(changes) - 5} more"] if len(changes) > 5 else []
        shown = "; ".join([*changes[:5], *rest])
        raise RunDirectoryError(
            f"{path} holds a run of another configuration ({shown}). Choose another directory, or pass overwrite=True "
            "(--overwrite) to replace the run."
        )


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`; a rule, a schedule and their like are one setting."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(show(value), Mapping)
        flat |= _flatten_settings(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def find_content(path: Path) -> Content | None:
    """Return what a directory holds, finished or not; None if it is none of them, or is not there."""
    if _is_run(path):
        return "run"
    runs = path / "runs"
    if (path / "comparison.json").exists() or any(map(_is_run, runs.glob("*/seed_*"))):
        return "comparison"
    if (path / "curves.parquet").exists() or any(map(_is_run, runs.glob("*/*/seed_*"))):
        return "sweep"
    return None


def check_content(path: Path, content: Content) -> None:
    """Refuse, with a `RunDirectoryError`, a directory that holds something else than what is to be written."""
    if (other := find_content(path)) not in (content, None):
        raise RunDirectoryError(
            f"{path} holds a {other}, and a {content} needs a directory of its own. Choose a new or empty directory."
        )


def check_place(path: Path, *, shared: bool) -> None:
    """Refuse to write a run into a directory that holds something else; a `shared` one may hold other files, too."""
    if (path / "config.json").exists():
        check_config_file(path / "config.json")
        check_links(path)
    elif path.exists() and (not path.is_dir() or not (shared or is_empty(path))):
        raise RunDirectoryError(
            f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty directory."
        )
    check_content(path, "run")


def explain_no_run(path: Path) -> str:
    """Say why a path is no run's directory, and what to give in its place."""
    content = find_content(path) or ("folder of runs" if _list_runs(path) else None)
    if content is not None:
        runs = ", ".join(_list_runs(path)[:4]) or f"none of them is kept: whence table {path}"
        return f"{path} holds a {content}, and one run is needed. Give one of the runs in it: {runs}."
    if _is_run(path.parent):
        return f"{path} is no run directory, and {path.parent} is one. Give that."
    reason = "holds no config.json, so it is no run directory" if path.is_dir() else "is not there"
    if not path.is_dir() and path.exists():
        reason = "is a file, and a run is a directory"
    names = [] if path.exists() else _list_runs(path.parent)
    advice = suggest(str(path), names) if names else " Give the directory that was passed as run= or --run."
    return f"{path} {reason}.{advice}"


def _list_runs(folder: Path) -> list[str]:
    """List the runs directly in a folder, or in the comparison or the sweep that it holds."""
    patterns = "*", "runs/*", "runs/*/seed_*", "runs/*/*/seed_*"
    return [str(path) for pattern in patterns for path in sorted(folder.glob(pattern)) if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Return whether a directory's config.json is marked as a run's, be it damaged or not."""
    try:
        text = require_file(path / "config.json").read_text(encoding="utf-8", errors="replace")
        return f'"{FORMAT}"' in text
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:  # it may not be read; whoever wrote it does not want it replaced
        return True


def sign_config(path: Path, config: Mapping[str, Any]) -> None:
    """Sign the configuration, in JSON types, of the run in a directory, if this user can have a key.

    The signature holds for this directory alone: not for a copy, nor for a run that was moved.
    """
    if (signature := sign(path, config)) is not None:
        with write_atomically(path / SIGNATURE) as temporary:
            temporary.write_text(signature, encoding="ascii")


def is_signed(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether this user signed a configuration in this directory, on this machine."""
    with suppress(OSError):
        return is_signature(require_file(path / SIGNATURE).read_bytes(), path, config)
    return False


def sign(path: Path, content: Any) -> str | None:
    """Return this user's signature of a content, in JSON types, in its place; None if there is no key to be had."""
    return None if (key := _read_key(is_needed=True)) is None else _sign(key, path, content)


def is_signature(signature: bytes, path: Path, content: Any) -> bool:
    """Return whether this is what `sign` returns."""
    return (key := _read_key()) is not None and hmac.compare_digest(_sign(key, path, content).encode(), signature)


def explain_distrust(path: Path, *, is_language: bool = False) -> str:
    """Return why nothing runs that a run's configuration names, and how to let it, in one line."""
    what = "model and data are not loaded: they" if is_language else "environment is not made: it"
    name = ", or name the environment by --env or env="
    if is_language:
        name = ", or name model and reward yourself: whence prove --model NAME --reward FILE.PY:FUNCTION"
    reason = f"{path} is not signed as a run that you made in this place, so its {what} may run code"
    return f"{reason}. Trust it by --trust or RunDirectory.open(path, trust=True){name}."


def explain_unsigned(path: Path) -> str:
    """Return why a run's rounds are not taken for what this user measured in this place, and what to do."""
    return (
        f"{path} is not signed as a run that you made in this place (its {SIGNATURE}), so it is not continued, and "
        "its figures are not taken. To replace it, pass overwrite=True (--overwrite). If it is yours, moved or copied, "
        f"sign it in Python: whence.open_run({str(path)!r}).sign()."
    )


def _sign(key: bytes, path: Path, content: Any) -> str:
    return hmac.digest(key, json.dumps([str(path.resolve()), content]).encode(), "sha256").hex()


def _read_key(*, is_needed: bool = False) -> bytes | None:
    """Return this user's key; None, which is said once, if it cannot be had. A missing key is made if it is needed."""
    file = user_state_path("whence") / "key"
    try:
        if is_needed and not file.exists():
            _make_key(file)
        status, key = file.stat(), file.read_bytes()
        is_private = os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
        if is_private and len(key) == _KEY_BYTES:
            return key
        reason = f"{file} has to hold {_KEY_BYTES} bytes and be yours alone, with mode 0600; deleted, it is made anew"
    except OSError as refusal:
        if isinstance(refusal, FileNotFoundError) and not is_needed:
            return None
        reason = str(refusal)
    if file not in _REFUSED:
        _REFUSED.add(file)
        log.warning("No run is signed as yours, so each needs --trust or trust=True: %s.", reason)
    return None


def _make_key(file: Path) -> None:
    """Write a random key that no one else can read, unless another process is first."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent) as temporary, suppress(FileExistsError):
        temporary.write(secrets.token_bytes(_KEY_BYTES))
        temporary.flush()
        os.fsync(temporary.fileno())
        os.link(temporary.name, file)
