"""The files of run directories, each written atomically with a checksum: tensors, tables, and tables that change.

Nothing is written through links, and no leftovers stay.
"""

import hashlib
import io
import json
import logging
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import polars as pl
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, explain_write_errors, first_line, require_file, write_atomically
from whence.runs.locks import LOCK, check_fork

log = logging.getLogger("whence")

T = TypeVar("T")

FOLDERS = ["policies", "recordings", "statistics", "states", "checkpoints", "model", "trl", "proofs", "again"]
"""What a run may hold besides tables of rounds."""

Table: TypeAlias = Literal["metrics", "timings", "evaluations"]
"""Tables with one row a round. Timings have a table of their own, because only they differ between equal runs."""

PerRound: TypeAlias = Literal["records", "episodes", "answers"]
"""Tables that a round has one of. Answers to sample prompts follow a round; those of round 0 are the start model's."""

RoundTensors: TypeAlias = Literal["policies", "recordings", "statistics", "states"]
"""Tensors that a round has: of the policy that collected it, of what its optimisation did, see `RoundRecording`,
VecNormalize's statistics when it was collected, and the states of a recurrent policy before its first step.

The policy with the number after the last round is the trained one.
"""

FLAGS = "flags"
"""The name of the table of the records that a reader flagged, each with a note."""

VOCABULARY = "vocabulary.parquet"
"""The file of the texts of a language model's tokens, by which pages show what stands in a run as ids."""


def check_links(path: Path) -> None:
    """Refuse, with a `RunDirectoryError`, a run directory of which a folder is a link that leads elsewhere.

    whence deletes and replaces files in a run's folders; those of another directory are not a run's.
    """
    for folder in path.iterdir():
        if folder.is_symlink() and folder.is_dir() and not folder.resolve().is_relative_to(path.resolve()):
            raise RunDirectoryError(
                f"{folder} is a link to {folder.resolve()}, outside of the run, and whence would write and delete "
                "files there. Put the folder itself in its place; the run directory as a whole may be a link."
            )


def is_empty(folder: Path) -> bool:
    """Return whether a directory holds nothing but leftovers."""
    return all(file.match(".*.tmp") or file.name == LOCK for file in folder.iterdir())


def check_writable(path: Path) -> None:
    """Refuse a run directory, or a folder in it, into which the system will not let a round's files be written."""
    for folder in (path, *(path / name for name in (*get_args(PerRound), *FOLDERS))):
        missing = () if folder.is_symlink() else (FileNotFoundError,)
        with explain_write_errors(folder), suppress(*missing):
            # The name is as long as those that `write_atomically` gives to a round's file.
            NamedTemporaryFile(dir=folder, prefix=".round_100000.safetensors.", suffix=".tmp").close()


_ROUND = re.compile(r"round_([0-9]{5}|[1-9][0-9]{5,17})\.[^.]+")


def list_numbered(folder: Path) -> list[tuple[str, int]]:
    """List the names of the files of rounds in a folder, each with its round."""
    names = os.listdir(folder) if folder.is_dir() else ()  # a tenth of the time of paths, of which there are many
    return [(name, int(match[1])) for name in names if (match := _ROUND.fullmatch(name))]


def remove_later(path: Path, last: int) -> None:
    """Delete what the rounds of a run directory wrote after round `last`, but the policy that collects the next one."""
    for table in (*get_args(Table), FLAGS):
        RowTable(path / f"{table}.parquet").keep(range(last + 1))
    _remove_leftovers(path)
    for folder in (*get_args(PerRound), *FOLDERS):
        for name, number in list_numbered(path / folder):
            if number > last + (folder == "policies"):
                with explain_write_errors(path / folder / name):
                    (path / folder / name).unlink()


def remove_rounds(path: Path) -> None:
    """Delete all that rounds wrote into a run directory."""
    _remove_leftovers(path)
    for file in (VOCABULARY, *(f"{table}.parquet" for table in (*get_args(Table), FLAGS))):
        with explain_write_errors(path / file):
            (path / file).unlink(missing_ok=True)
    for folder in (*get_args(PerRound), *FOLDERS):
        shutil.rmtree(path / folder, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Delete what processes left that were killed while they wrote."""
    with explain_write_errors(path):
        for file in (*path.glob(".*.tmp"), *path.glob("*/.*.tmp")):
            file.unlink()


CHANGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the contents of a file raise, where they are used, that are not those that whence wrote."""


class Damaged(RunDirectoryError):
    """A file holds something else than was written, as after a power cut."""


def put_damaged_aside(path: Path) -> None:
    """Keep the damaged tables of a run directory under other names, so that they count as lost."""
    for file in (path / VOCABULARY, *(path / f"{table}.parquet" for table in (*get_args(Table), FLAGS))):
        try:
            RowTable(file).read()
        except Damaged:
            with explain_write_errors(file):
                file.replace(aside := file.with_name(f"{file.name}.damaged"))
            log.warning("%s is damaged and counts as lost. It is kept as %s.", file, aside.name)


_CHECKSUM = {"checksum": f"blake2b:{'0' * 32}"}
"""Metadata of a file, in whose place `_write_checksum` puts the checksum of all other bytes."""

# As safetensors and Parquet write the name and the value. One half is enough, so that a file whose mark is damaged is
# not taken for one without a checksum, such as an adapter of PEFT's.
_MARK = re.compile(rb'(?:checksum(?:":"|\x18\x28).{8}|blake2b:(?=.{32}["\0]))(.{32})', re.DOTALL)

_DAMAGED = (
    "{} is damaged: its contents do not have the checksum that was written with them. Restore it from a copy, or use "
    "another round; if that is not to be had, train the run again (overwrite=True, --overwrite)."
)


def _write_checksum(path: Path) -> None:
    if (checksum := _find_checksum(path)) is not None:
        with path.open("r+b") as file:
            file.seek(checksum[0])
            file.write(checksum[2])


def _has_changed(path: str | Path) -> bool:
    """Return whether a file has other bytes than its checksum says; one without a checksum has not."""
    checksum = _find_checksum(path)
    return checksum is not None and checksum[1] != checksum[2]


def _find_checksum(path: str | Path) -> tuple[int, bytes, bytes] | None:
    """Return the place of a file's checksum, the checksum there, and that of all other bytes; None if it has none."""
    if not require_file(Path(path)).stat().st_size:  # which cannot be mapped
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # Only where the format has its metadata: elsewhere are texts of the user's, which may hold anything.
        start, end = 0, 8 + int.from_bytes(content[:8], "little")
        if content[-4:] == b"PAR1":
            start, end = len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content)
        marks = [*_MARK.finditer(content, start, min(end, len(content)))]
        if not marks:
            return None
        place, stop = marks[-1].span(1)
        with memoryview(content) as view:
            digest = hashlib.blake2b(view[:place], digest_size=16)
            digest.update(view[stop:])
        return place, content[place:stop], digest.hexdigest().encode()


def read_tensor_file(path: str | Path, error: type[WhenceError]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts of a file's header and its tensors, by name; an `error` if it is missing or damaged."""
    try:
        if not _has_changed(path):
            with safe_open(path, framework="pt") as file:
                return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (*CHANGED, OSError, SafetensorError) as broken:
        raise error(f"{path} cannot be read as safetensors: {first_line(broken)}") from None
    raise error(_DAMAGED.format(path))


def read_table(path: Path) -> pl.DataFrame:
    """Read a Parquet file; a `RunDirectoryError` says if it is damaged."""
    return _open_table(path, pl.read_parquet)


def scan_tables(paths: Mapping[int, Path]) -> pl.LazyFrame:
    """Return the Parquet files of rounds as one table; see `RunDirectory.scan`."""
    number, columns = pl.col("round"), pl.exclude("round")
    tables = [_open_table(path, pl.scan_parquet).with_columns(round=pl.lit(each)) for each, path in paths.items()]
    return pl.concat([table.select(number, columns) for table in tables], how="diagonal_relaxed")


def _open_table(path: Path, read: Callable[..., T]) -> T:
    check_fork()
    try:
        if not _has_changed(path):
            return read(path, glob=False)
    except OSError as refusal:
        raise RunDirectoryError(f"{path} cannot be read as Parquet: {refusal}") from None
    except (pl.exceptions.PanicException, pl.exceptions.PolarsError) as broken:
        raise Damaged(f"{path} cannot be read as Parquet: {broken}") from None
    raise Damaged(_DAMAGED.format(path))


def write_tensor_file(path: str | Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors, of which no two may share memory, and the texts of a header, atomically, with a checksum."""
    with write_atomically(path) as temporary:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, temporary, {**texts, **_CHECKSUM})
        _write_checksum(temporary)


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Write a Parquet file, atomically, with a checksum."""
    check_fork()
    with write_atomically(path) as temporary:
        content = io.BytesIO()  # not by Polars, whose older versions hide what the system refuses
        table.write_parquet(content, compression="zstd", metadata=_CHECKSUM)
        temporary.write_bytes(content.getvalue())  # a view would outlive its buffer where the write fails
        _write_checksum(temporary)


class RowTable:
    """One table of a run, in the file at `path`, which is written anew for each row: of 5,000 rows in 12 ms."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: pl.DataFrame | None = None

    def read(self) -> pl.DataFrame:
        """Read all rows; there is none if nothing was written yet."""
        try:
            return read_table(self._path) if self._path.exists() else pl.DataFrame()
        except Damaged as damage:
            raise Damaged(f"{damage} Deleted, it counts as lost, and the run is read without its rows.") from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row in the place of those of its round and later ones."""
        rows = self.read() if self._rows is None else self._rows
        added = pl.DataFrame([dict(row)], infer_schema_length=None)
        before = [] if rows.is_empty() else [rows.filter(pl.col("round") < row["round"])]
        self.replace(pl.concat([*before, added], how="diagonal_relaxed", rechunk=True))

    def keep(self, rounds: Collection[int]) -> None:
        """Delete the rows of all rounds but these."""
        rows = self.read()
        if not rows.is_empty() and not rows["round"].is_in(list(rounds)).all():
            self.replace(rows.filter(pl.col("round").is_in(list(rounds))))

    def replace(self, rows: pl.DataFrame) -> None:
        """Write other rows in the place of all."""
        write_table(rows, self._path)
        self._rows = rows


_WRITING = threading.Lock()


def read_flags(run: str | Path) -> pl.DataFrame:
    """Return the flags of a run directory: `round`, `record_id` and `note`, which may be empty."""
    flags = RowTable(Path(run) / f"{FLAGS}.parquet").read()
    return flags if flags.width else pl.DataFrame(schema={"round": pl.Int64, "record_id": pl.Int64, "note": pl.String})


def write_flag(run: str | Path, number: int, record: int, note: str | None) -> None:
    """Flag a record of a round, in place of its flag if it has one; the note None takes the flag away."""
    write_flags(run, pl.DataFrame({"round": [number], "record_id": [record]}), note)


def write_flags(run: str | Path, records: pl.DataFrame, note: str | None) -> None:
    """Flag records, `round` and `record_id` of each, in place of their flags; the note None takes the flags away."""
    with _WRITING:
        flags = read_flags(run)
        added = records.select(pl.col("round", "record_id").cast(pl.Int64), note=pl.lit(note, pl.String))
        others = flags.join(added, on=["round", "record_id"], how="anti")
        rows = pl.concat([others, added.drop_nulls("note")]).sort("round", "record_id")
        RowTable(Path(run) / f"{FLAGS}.parquet").replace(rows)


def read_vocabulary(run: Path) -> list[str]:
    """Return the text of each token id; nothing if the run holds none."""
    texts = RowTable(run / VOCABULARY).read()
    return texts["text"].to_list() if texts.width else []


def write_vocabulary(run: Path, texts: Sequence[str]) -> None:
    """Write the text of each token id."""
    write_table(pl.DataFrame({"text": list(texts)}, schema={"text": pl.String}), run / VOCABULARY)


def digest_content(path: Path) -> str | None:
    """Return a digest of a file's bytes, or of the files of a folder; None: it is not there, it may be on a hub.

    Of a folder with a model these are the files directly in it, of another one those in its folders, too; but a
    trainer's states and what is hidden or cached. Any changed byte is noticed. A gigabyte takes a second or two, once
    in a process.
    """
    if path.is_file():
        return _digest_file(path, "sha256")
    if not path.is_dir():
        return None
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    files = [file for file in sorted(path.glob("*" if is_model else "**/*")) if file.is_file()]
    names = {file.relative_to(path).as_posix(): file for file in files if not _NO_CONTENT.search(file.name)}
    digests = json.dumps({name: digest_content(file) for name, file in names.items()})
    return hashlib.sha256(digests.encode()).hexdigest()


_NO_CONTENT = re.compile(r"^\.|^cache-|\.(pt|pth|md)$")


def _digest_file(path: Path, kind: str) -> str:
    status = path.stat()
    return _digest_bytes(path, kind, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _digest_bytes(path: Path, kind: str, *identity: int) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, kind).hexdigest()


def read_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file in a folder and its folders, by its path in there."""
    files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
    return {name: _digest_file(file, "blake2b") for name, file in files.items()}
