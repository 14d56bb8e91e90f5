"""A run on disk: typed, versioned files, each written atomically, none of them a pickle."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import polars as pl
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.guards import write_atomically

FORMAT, VERSION = "whence-run", 1

_ROUND = re.compile(r"round_(\d+)")

Table: TypeAlias = Literal["metrics", "timings", "evaluations"]
"""Tables of one row a round. Timings live apart: results are reproducible, timings are not."""

PerRound: TypeAlias = Literal["records", "episodes"]
"""Tables of which each round has its own."""


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
    policies/round_00005.safetensors   the policy that collected round 5; the trained policy follows the last round
    recordings/round_00005.safetensors what round 5's optimisation did, where it was asked for
    ```

    A file is there as a whole or not at all, whenever the process is killed. Make one with `create` or `open`.

    Attributes:
        path: the directory.
        config: what was run, JSON types only.
        versions: of the libraries it was run with.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    _rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, versions: Mapping[str, str] | None = None) -> Self:
        """Start a run. A directory that holds a run of the same configuration is started over.

        Args:
            path: the directory; made where missing.
            config: what is run, in JSON types.
            versions: of the libraries in use; told, but not compared.

        Raises:
            RunDirectoryError: the directory holds a run of another configuration, or files that are no run; or the
                configuration is not JSON.
        """
        path = Path(path)
        try:
            plain = json.loads(json.dumps(config, allow_nan=False))
        except (TypeError, ValueError) as wrong:
            raise RunDirectoryError(
                f"The configuration is not JSON ({wrong}): {config}. Write numbers like inf as text."
            ) from None
        if (path / "config.json").exists():
            cls.open(path).check_same(plain)
            for name in (*get_args(PerRound), "policies", "recordings"):
                shutil.rmtree(path / name, ignore_errors=True)
            for name in get_args(Table):
                (path / f"{name}.parquet").unlink(missing_ok=True)
        elif path.exists() and (not path.is_dir() or any(not _is_leftover(file) for file in path.iterdir())):
            raise RunDirectoryError(
                f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty directory."
            )
        made = cls(path, plain, dict(versions or {}))
        made._write_config()
        return made

    @classmethod
    def resume(
        cls, path: str | Path, config: Mapping[str, Any], *, rounds: int, may_change: Collection[str] = ()
    ) -> Self:
        """Go on with a run after some round, and forget what came later.

        Args:
            path: the directory.
            config: what is run, in JSON types.
            rounds: how many are kept.
            may_change: what in the configuration need not be as it was; of nested settings, `outer.inner`.

        Raises:
            RunDirectoryError: no run is there, or one of another configuration.
        """
        old = cls.open(path)
        old.check_same(config, but=may_change)
        run = cls(old.path, json.loads(json.dumps(config)), old.versions)
        run._write_config()
        for name in get_args(Table):
            if not (table := run.table(name)).is_empty():
                _write(table.filter(pl.col("round") <= rounds), run.path / f"{name}.parquet")
        for number in run.rounds():
            if number > rounds:
                run._of_round("records", number, "parquet").unlink()
        return run

    def _write_config(self) -> None:
        document = {"format": FORMAT, "version": VERSION, "config": self.config, "versions": self.versions}
        with write_atomically(self.path / "config.json") as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run, finished or not.

        Raises:
            RunDirectoryError: no run is there, or one of a format this version does not read.
        """
        path = Path(path)
        try:
            document = json.loads((path / "config.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise RunDirectoryError(
                f"{path} holds no config.json, so it is no run directory. Give the directory that was passed as `run`."
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as broken:
            raise RunDirectoryError(
                f"{path / 'config.json'} is not readable as JSON: {broken}. whence writes this file whole, so "
                "something else changed it: restore it, or run again into a new directory."
            ) from None
        found = (document.get("format"), document.get("version")) if isinstance(document, dict) else (None, None)
        if found != (FORMAT, VERSION):
            raise RunDirectoryError(
                f"{path / 'config.json'} is marked {found[0]!r}, version {found[1]!r}; this version of whence reads "
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
        """Refuse a configuration, in JSON types, that is not this run's, whatever stands at the names in `but`.

        Raises:
            RunDirectoryError: names what differs.
        """
        mine, config = _flat(self.config), _flat(json.loads(json.dumps(config)))  # in which tuples are lists
        differing = [
            name for name in sorted((mine.keys() | config.keys()) - set(but)) if mine.get(name) != config.get(name)
        ]
        if differing:
            changes = (f"{name} was {mine.get(name)!r}, now {config.get(name)!r}" for name in differing[:3])
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({'; '.join(changes)}). Choose another directory, "
                "or delete this one."
            )

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table and write the table."""
        if table not in self._rows:
            self._rows[table] = self.table(table).to_dicts()
        rows = self._rows[table]
        rows.append(dict(row))
        _write(pl.DataFrame(rows, infer_schema_length=None), self.path / f"{table}.parquet")

    def write_round(self, name: PerRound, number: int, table: pl.DataFrame) -> None:
        """Write one round's records or episodes."""
        _write(table, self._of_round(name, number, "parquet"))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the policy that collects round `number` (from 1); no two may share memory."""
        with write_atomically(self._of_round("policies", number, "safetensors")) as temporary:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)

    def recording_path(self, number: int) -> Path:
        """Return the file of what round `number`'s optimisation did; see `whence.RoundRecording`."""
        return self._of_round("recordings", number, "safetensors")

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; without rows where nothing was written yet."""
        return self._read(self.path / f"{name}.parquet", missing_ok=True)

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records or episodes."""
        return self._read(self._of_round(name, number, "parquet"))

    def policy(self, number: int) -> dict[str, Tensor]:
        """Read the policy that collected round `number`."""
        path = self._of_round("policies", number, "safetensors")
        self._check_there(path)
        try:
            return load_file(path)
        except SafetensorError as broken:
            raise RunDirectoryError(f"{path} cannot be read as safetensors: {broken}") from None

    def rounds(self) -> list[int]:
        """List the rounds whose records are there."""
        return self._numbers("records", "parquet")

    def recorded_rounds(self) -> list[int]:
        """List the rounds whose optimisation was recorded."""
        return self._numbers("recordings", "safetensors")

    def _numbers(self, folder: str, suffix: str) -> list[int]:
        named = (_ROUND.fullmatch(file.stem) for file in (self.path / folder).glob(f"*.{suffix}"))
        return sorted(int(found[1]) for found in named if found)

    def _of_round(self, folder: str, number: int, suffix: str) -> Path:
        return self.path / folder / f"round_{number:05d}.{suffix}"

    def _read(self, path: Path, *, missing_ok: bool = False) -> pl.DataFrame:
        if missing_ok and not path.exists():
            return pl.DataFrame()
        self._check_there(path)
        try:
            return pl.read_parquet(path, glob=False)
        except pl.exceptions.PolarsError as broken:
            raise RunDirectoryError(f"{path} cannot be read as Parquet: {broken}") from None

    def _check_there(self, path: Path) -> None:
        if not path.exists():
            rounds = self.rounds()
            there = f"rounds {rounds[0]} to {rounds[-1]}" if rounds else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {there}.")


def strip_addresses(text: str) -> str:
    """Return the text of an object without its place in memory, which differs from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping) and value
        found |= _flat(value, f"{before}{name}.") if nested else {f"{before}{name}": value}
    return found


def _is_leftover(file: Path) -> bool:
    # Of a process that was killed while it wrote; see `write_atomically`.
    return file.name.startswith(".") and file.name.endswith(".tmp")


def _write(table: pl.DataFrame, path: Path) -> None:
    with write_atomically(path) as temporary:
        table.write_parquet(temporary, compression="zstd")
