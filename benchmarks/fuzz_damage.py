"""Damaged inputs: bytes, JSON, tables, tensors and files, each drawn from a seeded generator."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

MARKUP = "</script><script>whence_was_here()</script>"
"""Text that a page must escape."""

HOSTILE = (
    *(
        "",
        " ",
        "\x00",
        "\x1b]8;;http://example.invalid\x1b\\link\x1b]8;;\x1b\\",
        "\x1b[2J\x07",
        "[link=http://a]b[/link]",
    ),
    *("[/]", "[bold", MARKUP, "<img src=x onerror=whence_was_here()>", "{{ 7 * 7 }}", "../../sentinel", "/etc/passwd"),
    *(
        "nan",
        "inf",
        "-inf",
        "1e999",
        "null",
        "None",
        "é\u202e",
        "\U0001f600",
        "a" * 5000,
        "%s%n",
        "'; DROP TABLE",
        "`rm`",
    ),
    *("os:system", "__import__('os')", "round_00001", "record_id", "score", "..", "~", "C:\\", "file:///etc/passwd"),
)
"""Texts that a reader might take for something else."""

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), float("-inf"), 1.5),
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": [1, {"b": 2}]},
    *NUMBERS,
    *HOSTILE,
)
"""Values that may stand where another was."""

NAMES = (
    *("record_id", "episode_id", "env_index", "step", "score", "error", "keep", "weight", "reason", "action", "reward"),
    *("observation", "observation.a", "advantage", "value", "return", "log_prob", "prompt", "response", "token_texts"),
    *("token_parts", "round", "group", "generator_state", "answer", "prompt_ids", "response_ids", "mean", "a.b"),
)
"""Names of columns, of tables that a run has."""

_KINDS: tuple[Any, ...] = (
    *(pl.String, pl.Float32, pl.Float64, pl.Int8, pl.Int64, pl.UInt64, pl.Boolean, pl.Binary, pl.Date, pl.Categorical),
    *(pl.List(pl.Int64), pl.List(pl.String), pl.Null, pl.Duration, pl.Struct({"a": pl.Int64}), pl.Decimal(20, 3)),
    *(pl.Datetime, pl.Time, pl.Array(pl.Float32, 2), pl.Enum(["a", "b"])),
)


def draw_text(rng: random.Random) -> str:
    """Return a hostile text, or random characters."""
    if rng.random() < 0.7:
        return rng.choice(HOSTILE)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(12)))


def draw_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of any JSON type, nested a few levels at most."""
    if depth < 3 and rng.random() < 0.25:
        if rng.random() < 0.5:
            return [draw_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {draw_text(rng): draw_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return copy.deepcopy(rng.choice(VALUES))  # what is damaged next must not change them


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some are missing, changed, repeated or added."""
    array = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(array) + 1)
        length = rng.choice((1, 2, 8, 64, 1000))
        kind = rng.randrange(7)
        if kind == 0:
            del array[at:]
        elif kind == 1:
            for _ in range(rng.choice((1, 1, 3, 20))):
                if array:
                    array[rng.randrange(len(array))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            array[at:at] = rng.randbytes(length)
        elif kind == 3:
            del array[at : at + length]
        elif kind == 4:
            array[at : at + length] = array[at : at + length] * 2
        elif kind == 5:
            array[at : at + length] = bytes(len(array[at : at + length]))
        else:
            array[at : at + length] = rng.choice((b"\xff\xfe", b"\xc3\x28", b"\x00", b"NaN", b"-1", b"9" * 40, b'"'))
    return bytes(array)


def damage_value(value: Any, rng: random.Random, changes: int | None = None) -> Any:
    """Return JSON of which some parts are missing, renamed, or of another kind."""
    value = json.loads(json.dumps(value))
    for _ in range(changes or rng.choice((1, 1, 1, 2, 4))):
        places = list(_list_places(value))
        if not places or rng.random() < 0.03:
            return draw_value(rng)
        holder, key = rng.choice(places)
        kind = rng.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw_text(rng)] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            holder[draw_text(rng)] = draw_value(rng)
        elif kind == 3 and isinstance(holder, list):
            holder.insert(key, draw_value(rng))
        elif kind == 4:
            holder[key] = [holder[key]]
        elif kind == 5:
            holder[key] = str(holder[key])
        elif kind == 6:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        else:
            holder[key] = draw_value(rng)
    return value


def _list_places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of nested JSON."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    places = [(value, key) for key in keys]
    return places + [place for key in keys for place in _list_places(value[key])]


def damage_json(text: bytes, rng: random.Random) -> bytes:
    """Return the text of a JSON document with damage of its values or of its bytes."""
    kind = rng.random()
    if kind < 0.7:
        return encode_json(damage_value(json.loads(text), rng), rng)
    if kind < 0.74:
        opening = rng.choice(("[", '{"a":'))
        return (opening * rng.choice((50, 2000, 100_000))).encode()
    if kind < 0.78:
        return rng.choice(
            (b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"0", b'""', b"NaN", b"1" * 5000, b"\xef\xbb\xbf{}")
        )
    return damage_bytes(text, rng)


def encode_json(value: Any, rng: random.Random) -> bytes:
    """Return JSON's text; numbers that are not finite are written as Python writes them."""
    return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


def damage_table(table: pl.DataFrame, rng: random.Random) -> pl.DataFrame:
    """Return a table with missing, renamed, swapped, added, retyped or emptied columns, or with other rows."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if table.width == 0:
            return table
        try:
            table = rng.choice(_TABLE_DAMAGE)(table, rng.choice(table.columns), rng)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, TypeError, ValueError, OverflowError):
            table = table.drop(rng.choice(table.columns))  # this kind of damage does not fit this column
    return table


def _rename(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    other = rng.choice((*NAMES, *HOSTILE))
    return table.drop(other, strict=False).rename({name: other}) if other != name else table


def _swap(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    other = rng.choice(table.columns)
    return table.rename({name: other, other: name}) if other != name else table


def _retype(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    kind = rng.choice(_KINDS)
    try:
        return table.with_columns(pl.col(name).cast(kind, strict=False))
    except pl.exceptions.PolarsError:
        return table.with_columns(pl.lit(None).cast(kind, strict=False).alias(name))


def _set_values(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    value = rng.choice(VALUES)
    count = rng.choice((1, len(table)))
    if isinstance(value, list | dict):
        value = str(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        value = rng.choice((2**63 - 1, -(2**63)))
    at = pl.int_range(pl.len()) < count
    return table.with_columns(pl.when(at).then(pl.lit(value)).otherwise(pl.col(name)).alias(name))


def _set_numbers(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    kind = table.schema[name]
    value = rng.choice([number for number in NUMBERS if isinstance(number, float) or abs(number) < 2**63])
    row = rng.randrange(max(1, len(table)))
    at = pl.int_range(pl.len()) == row
    return table.with_columns(
        pl.when(at).then(pl.lit(value).cast(kind, strict=False)).otherwise(pl.col(name)).alias(name)
    )


def _set_null(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    count = rng.choice((1, len(table) // 2, len(table)))
    return table.with_columns(pl.when(pl.int_range(pl.len()) >= count).then(pl.col(name)).alias(name))


def _add(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    value = rng.choice(NUMBERS[:7]) if rng.random() < 0.5 else draw_text(rng)
    return table.with_columns(pl.lit(value).alias(rng.choice((*NAMES, *HOSTILE))))


def _wrap(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    if rng.random() < 0.5:
        return table.with_columns(pl.concat_list(pl.col(name), pl.col(name)).alias(name))
    return table.with_columns(pl.struct(pl.col(name).alias("a")).alias(name))


def _cut_rows(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    count = rng.choice((0, 0, 1, 2, len(table) // 2))
    return table.head(count)


def _repeat_rows(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    return pl.concat([table, table.head(rng.choice((1, len(table))))])


def _shuffle(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    return table.sample(fraction=1.0, shuffle=True, seed=rng.randrange(2**32))


def _ragged(table: pl.DataFrame, name: str, rng: random.Random) -> pl.DataFrame:
    values = [[rng.choice(NUMBERS[14:18])] * rng.randrange(4) for _ in range(len(table))]
    return table.with_columns(pl.Series(name, values, dtype=pl.List(pl.Float64)))


_TABLE_DAMAGE: Sequence[Callable[[pl.DataFrame, str, random.Random], pl.DataFrame]] = (
    *(lambda table, name, rng: table.drop(name), lambda table, name, rng: table.select(name)),
    *(_rename, _rename, _swap, _retype, _retype, _retype, _set_values, _set_values, _set_numbers, _set_numbers),
    *(_set_null, _add, _wrap, _cut_rows, _repeat_rows, _shuffle, _ragged),
)


def damage_parquet(data: bytes, rng: random.Random, scratch: Path) -> bytes:
    """Return the bytes of a Parquet file with damage of its table or of its bytes."""
    if rng.random() < 0.25:
        return damage_bytes(data, rng)
    table = damage_table(pl.read_parquet(data), rng)
    file = scratch / "damaged.parquet"
    try:
        table.write_parquet(file)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError):
        return damage_bytes(data, rng)
    return file.read_bytes()


def damage_toml(text: str, rng: random.Random) -> bytes:
    """Return the text of a TOML file with other values, keys, lines or bytes."""
    if rng.random() < 0.3:
        return damage_bytes(text.encode(), rng)
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        kind = rng.randrange(6)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, rng.choice(lines))
        elif kind == 2 and equals:
            lines[at] = f"{rng.choice((draw_text(rng), *NAMES, 'seed', 'rounds', 'device'))} = 1"
        elif kind == 3:
            lines.insert(
                at, rng.choice(("[[experiment]]", "[experiment]", "[a.b.c]", "experiment = 3", "a." * 500 + "b = 1"))
            )
        elif equals:
            lines[at] = f"{key}= {draw_toml(rng)}"
        if not lines:
            break
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def draw_toml(rng: random.Random) -> str:
    """Return a value as TOML writes it, or nearly."""
    simple = (
        "1",
        "-1",
        "0",
        "0.5",
        "nan",
        "inf",
        "-inf",
        "true",
        "[]",
        "{}",
        "[1, 'a']",
        "{a = {b = 1}}",
        "1979-05-27",
    )
    strange = (
        "07:32:00",
        "9" * 40,
        "1e400",
        "'x",
        "[[[[[[1]]]]]]",
        "[" * 3000,
        "{a=" * 500,
        "0x10",
        "1_000",
        "''",
        "[{}]",
    )
    if rng.random() < 0.3:
        return json.dumps(draw_text(rng))
    return rng.choice((*simple, *strange))


def replace_file(path: Path, rng: random.Random, elsewhere: Path) -> None:
    """Put something in place of a file: nothing, a directory, a link to nothing, to itself or to another file."""
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.with_name("nowhere"))
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to(elsewhere)
    elif kind == 4:
        path.write_bytes(rng.choice((b"", b"PAR1", b"\x00" * 100, rng.randbytes(300))))


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
