"""A run on disk: typed, versioned files, each written atomically, no pickles."""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import polars as pl
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from whence.columns import check_columns
from whence.errors import RunDirectoryError, first_line
from whence.guards import write_atomically
from whence.tensorfiles import read_tensor_file

FORMAT, VERSION = "whence-run", 1

_ROUND = re.compile(r"round_([0-9]{5,18})")

Table: TypeAlias = Literal["metrics", "timings", "evaluations"]
"""Tables with one row a round. Timings have a table of their own, because only they differ between equal runs."""

PerRound: TypeAlias = Literal["records", "episodes", "answers"]
"""Tables that a round has one of. Answers to sample prompts follow a round; those of round 0 are the start model's."""


@dataclass(eq=False)
class RunDirectory:
    """The directory of one training run.

    ```
    config.json                        what was run, and with which versions
    metrics.parquet                    one row a round: what was scored, dropped and trained
    timings.parquet                    one row a round: seconds by stage
    evaluations.parquet                one row an evaluation
    records/round_00005.parquet        the records of round 5: score, kept or not, why
    episodes/round_00005.parquet       the episodes that began in round 5: what is needed to play them again
    answers/round_00005.parquet        a language model's answers to sample prompts after round 5
    policies/round_00005.safetensors   the policy that collected round 5; the trained policy follows the last round
    recordings/round_00005.safetensors what round 5's optimisation did, if recordings are on
    ```

    Each file is complete or absent, whenever the process is killed. Make a `RunDirectory` with `create` or `open`.
    Every method that writes raises `RunDirectoryError` if the system refuses, with the path and the reason.

    Attributes:
        path: the directory.
        config: the run's configuration, JSON types only.
        versions: versions of the libraries it was run with.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        versions: Mapping[str, str] | None = None,
        shared: bool = False,
    ) -> Self:
        """Start a run. If the directory holds a run of the same configuration, that run is deleted first.

        Args:
            path: the directory; made if it is missing.
            config: the run's configuration, in JSON types.
            versions: versions of the libraries in use; stored, not compared.
            shared: whether another program writes into the directory, too, so that it may hold files that are no run.

        Raises:
            RunDirectoryError: the directory holds a run of another configuration, or files that are no run; the
                configuration is not JSON; or the directory cannot be written.
        """
        path = Path(path)
        try:
            plain = json.loads(json.dumps(config, allow_nan=False))
        except (TypeError, ValueError) as wrong:
            raise RunDirectoryError(
                f"The configuration is not JSON ({wrong}): {config}. Write numbers like inf as text."
            ) from None
        with _explain_write_errors(path):
            if (path / "config.json").exists():
                check_links(path)
                cls.open(path).check_same(plain)
                _remove_rounds(path)
            elif path.exists() and (not path.is_dir() or not (shared or _is_empty(path))):
                raise RunDirectoryError(
                    f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty "
                    "directory."
                )
        run = cls(path, plain, dict(versions or {}))
        run._write_config()
        return run

    @classmethod
    def resume(
        cls, path: str | Path, config: Mapping[str, Any], *, rounds: int, may_change: Collection[str] = ()
    ) -> Self:
        """Continue a run after one of its rounds, and delete what later rounds wrote.

        Args:
            path: the directory.
            config: the run's configuration, in JSON types.
            rounds: number of rounds to keep.
            may_change: names of settings that may differ from the stored ones; `outer.inner` for nested settings.

        Raises:
            RunDirectoryError: the directory holds no run, or one of another configuration; or it cannot be written.
        """
        old = cls.open(path)
        check_links(old.path)
        old.check_same(config, but=may_change)
        run = cls(old.path, json.loads(json.dumps(config)), old.versions)
        run._write_config()
        for name in get_args(Table):
            if not (table := run.table(name)).is_empty():
                _write(table.filter(pl.col("round") <= rounds), run.path / f"{name}.parquet")
        for name in get_args(PerRound):
            for number in run._numbers(name, "parquet"):
                if number > rounds:
                    file = run._round_path(name, number, "parquet")
                    with _explain_write_errors(file):
                        file.unlink()
        return run

    def _write_config(self) -> None:
        document = {"format": FORMAT, "version": VERSION, "config": self.config, "versions": self.versions}
        with write_run_file(self.path / "config.json") as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run, finished or not.

        Raises:
            RunDirectoryError: the directory holds no run, one that may not be read, or one of another format.
        """
        path = Path(path)
        try:
            document = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise RunDirectoryError(
                f"{path} holds no config.json, so it is no run directory. Give the directory that was passed as `run`."
            ) from None
        except OSError as refusal:
            raise RunDirectoryError(
                f"{path / 'config.json'} cannot be read: {_system_reason(refusal)}. Give yourself the right to read it."
            ) from refusal
        except (RecursionError, ValueError) as broken:
            raise RunDirectoryError(
                f"{path / 'config.json'} is not readable as JSON: {broken}. whence writes this file whole, so "
                "something else changed it: restore it, or run again into a new directory."
            ) from None
        marks = (document.get("format"), document.get("version")) if isinstance(document, dict) else (None, None)
        if marks != (FORMAT, VERSION):
            raise RunDirectoryError(
                f"{path / 'config.json'} is marked {marks[0]!r}, version {marks[1]!r}; this version of whence reads "
                f"{FORMAT!r}, version {VERSION}."
            )
        config, versions = document.get("config"), document.get("versions")
        if not isinstance(config, dict) or not isinstance(versions, dict):
            raise RunDirectoryError(
                f"{path / 'config.json'} needs the objects `config` and `versions`. whence writes both, so something "
                "else changed the file: restore it, or run again into a new directory."
            )
        return cls(path, config, versions)

    def check_same(self, config: Mapping[str, Any], *, but: Collection[str] = ()) -> None:
        """Refuse a configuration, in JSON types, that differs from this run's in any setting except those in `but`.

        Raises:
            RunDirectoryError: a setting differs; the message names it.
        """
        before = _flatten_settings(self.config)
        now = _flatten_settings(json.loads(json.dumps(config)))  # JSON turns tuples into lists
        names = sorted((before.keys() | now.keys()) - set(but))
        differing = [name for name in names if before.get(name) != now.get(name)]
        if differing:
            changes = (f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in differing[:3])
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({'; '.join(changes)}). Choose another directory, "
                "or delete this one."
            )

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table and write the table."""
        if table not in self._rows:
            self._rows[table] = self.table(table).to_dicts()
        rows = [*self._rows[table], dict(row)]
        _write(pl.DataFrame(rows, infer_schema_length=None), self.path / f"{table}.parquet")
        self._rows[table] = rows

    def write_round(self, name: PerRound, number: int, table: pl.DataFrame) -> None:
        """Write one round's records, episodes or answers."""
        _write(table, self._round_path(name, number, "parquet"))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the policy that collects round `number` (from 1); no two may share memory."""
        with write_run_file(self.policy_path(number)) as temporary:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)

    def recording_path(self, number: int) -> Path:
        """Return the path of round `number`'s recording; see `whence.RoundRecording`."""
        return self._round_path("recordings", number, "safetensors")

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; it is empty if nothing was written yet."""
        return self._read(self.path / f"{name}.parquet", missing_ok=True)

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records, episodes or answers.

        Raises:
            RunDirectoryError: the round is not there, cannot be read, or has columns of other types than whence writes.
        """
        path = self._round_path(name, number, "parquet")
        table = self._read(path)
        check_columns(table, str(path), needed=("record_id",) if name == "records" else (), error=RunDirectoryError)
        return table

    def round_path(self, name: PerRound, number: int) -> Path:
        """Return the path of one round's records, episodes or answers, whether it is there or not."""
        return self._round_path(name, number, "parquet")

    def policy_path(self, number: int) -> Path:
        """Return the path of the policy that collected round `number`, whether it is there or not."""
        return self._round_path("policies", number, "safetensors")

    def policy(self, number: int) -> dict[str, Tensor]:
        """Read the policy that collected round `number`."""
        path = self.policy_path(number)
        self._check_exists(path)
        return read_tensor_file(path, RunDirectoryError)[1]

    def rounds(self) -> list[int]:
        """List the rounds whose records were written."""
        return self._numbers("records", "parquet")

    def answered_rounds(self) -> list[int]:
        """List the rounds after which sample prompts were answered; 0: before the first."""
        return self._numbers("answers", "parquet")

    def policies(self) -> list[int]:
        """List the rounds whose policy was written; the one after the last round is the trained policy's."""
        return self._numbers("policies", "safetensors")

    def recorded_rounds(self) -> list[int]:
        """List the rounds whose optimisation was recorded."""
        return self._numbers("recordings", "safetensors")

    def _numbers(self, folder: str, suffix: str) -> list[int]:
        matches = (_ROUND.fullmatch(file.stem) for file in (self.path / folder).glob(f"*.{suffix}"))
        return sorted(int(match[1]) for match in matches if match and match[0] == f"round_{int(match[1]):05d}")

    def _round_path(self, folder: str, number: int, suffix: str) -> Path:
        return self.path / folder / f"round_{number:05d}.{suffix}"

    def _read(self, path: Path, *, missing_ok: bool = False) -> pl.DataFrame:
        if missing_ok and not path.exists():
            return pl.DataFrame()
        self._check_exists(path)
        try:
            return pl.read_parquet(path, glob=False)
        except (OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError) as broken:
            raise RunDirectoryError(f"{path} cannot be read as Parquet: {broken}") from None

    def _check_exists(self, path: Path) -> None:
        if not path.exists():
            rounds = self.rounds()
            written = f"rounds {rounds[0]} to {rounds[-1]}" if rounds else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {written}.")


def check_links(path: Path) -> None:
    """Refuse to write into a run directory of which a folder is a link that leads elsewhere.

    whence deletes and replaces files in a run's folders; those of another directory are not a run's.

    Raises:
        RunDirectoryError: names the link and where it leads.
    """
    for folder in path.iterdir():
        if folder.is_symlink() and folder.is_dir() and not folder.resolve().is_relative_to(path.resolve()):
            raise RunDirectoryError(
                f"{folder} is a link to {folder.resolve()}, outside of the run, and whence would write and delete "
                "files there. Put the folder itself in its place; the run directory as a whole may be a link."
            )


def strip_addresses(text: str) -> str:
    """Return an object's text without memory addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


@contextmanager
def write_run_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes the run's file `path` on a clean exit; see `write_atomically`.

    Raises:
        RunDirectoryError: the system refuses to write; the message says why and what to do.
    """
    with _explain_write_errors(path), write_atomically(path) as temporary:
        yield temporary


@contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as refusal:
        number = _system_error_number(refusal)
        if number is None and not isinstance(refusal, OSError):
            raise
        remedy = (
            "Free space on that disk, or choose a directory on another one."
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "Choose a directory that you may write to, or change the permissions of this one."
        )
        raise RunDirectoryError(f"{path} cannot be written: {_system_reason(refusal)}. {remedy}") from refusal


def _system_error_number(error: Exception) -> int | None:
    """Return the system's number of an error; safetensors and Polars mention it in the text of their own errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _system_reason(error: Exception) -> str:
    number = _system_error_number(error)
    if number is None:
        return first_line(error)
    kind = type(OSError(number, ""))  # such as PermissionError
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number) if kind is OSError else kind.__name__})"


def _remove_rounds(path: Path) -> None:
    """Delete everything that a run wrote except its configuration."""
    for name in (*get_args(PerRound), "policies", "recordings", "phases"):
        shutil.rmtree(path / name, ignore_errors=True)
    for name in get_args(Table):
        (path / f"{name}.parquet").unlink(missing_ok=True)


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping) and value
        flat |= _flatten_settings(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _is_empty(folder: Path) -> bool:
    """Return whether a directory holds nothing but leftovers."""
    return all(_is_leftover(file) for file in folder.iterdir())


def _is_leftover(file: Path) -> bool:
    """Return whether a file was left by a process that was killed inside `write_atomically`."""
    return file.name.startswith(".") and file.name.endswith(".tmp")


def _write(table: pl.DataFrame, path: Path) -> None:
    with write_run_file(path) as temporary:
        table.write_parquet(temporary, compression="zstd")
