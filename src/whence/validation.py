"""Dataclasses of settings, checked by pydantic; an error names the field, its value and what is needed."""

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field as DataclassField
from dataclasses import field, fields
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import AfterValidator, Field
from pydantic_core import ErrorDetails, PydanticCustomError

from whence.core import WhenceError, suggest

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]

_T = TypeVar("_T")

_NEEDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "a list of one or more",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a tuple",
    "mapping_type": "a table of settings",
    "dict_type": "a table of settings",
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "at most {le:g}",
}
"""What a value has to be, by pydantic's type of the error."""


def one_of(known: Collection[str]) -> AfterValidator:
    """Return a check that refuses names that are not known, and suggests the nearest."""

    def check(name: str) -> str:
        if name not in known:
            raise PydanticCustomError("unknown", "{hint}", {"hint": suggest(name, known)})
        return name

    return AfterValidator(check)


@dataclass_transform(frozen_default=True, field_specifiers=(DataclassField, field))
def settings(what: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that makes a frozen dataclass, whose values are checked strictly when it is made.

    Args:
        what: what the dataclass describes, as a message begins: "A run".
    """

    def decorate(plain: type[_T]) -> type[_T]:
        config = pydantic.ConfigDict(strict=True, extra="forbid")
        checked: Any = pydantic.dataclasses.dataclass(plain, frozen=True, config=config)
        init = checked.__init__

        @wraps(init)
        def check(self: Any, *args: Any, **values: Any) -> None:
            try:
                init(self, *args, **values)
            except pydantic.ValidationError as failure:
                raise _explain(what, checked, failure.errors(include_url=False)) from None

        checked.__init__ = check
        return checked  # type: ignore[no-any-return]

    return decorate


def read_table(kind: type[_T], what: str, values: Any) -> _T:
    """Return the settings that a table holds; a `WhenceError` if a value is missing, unknown or refused."""
    if not isinstance(values, Mapping):
        raise WhenceError(f"{what} is {reprlib.repr(values)}; a table of settings is needed.")
    return kind(**values)


def _explain(what: str, kind: Any, errors: list[ErrorDetails]) -> WhenceError:
    """Return an error that names the first field that was refused; one that the settings raised stays as it is."""
    first, context = errors[0], errors[0].get("ctx", {})
    if isinstance(error := context.get("error"), WhenceError):
        return error
    name = first["loc"][0]
    if first["type"] == "unexpected_keyword_argument":
        return WhenceError(f"{what} has no {name!r}.{suggest(str(name), [each.name for each in fields(kind)])}")
    if first["type"] == "missing":
        return WhenceError(f"{what} lacks {name!r}.")
    if first["type"] == "unknown":
        return WhenceError(f"The {name} {first['input']!r} is unknown.{context['hint']}")
    needs = [_NEEDS.get(each["type"], each["msg"]).format(**each.get("ctx", {})) for each in errors]
    same = [need for need, each in zip(needs, errors, strict=True) if each["loc"][0] == name]  # of a union, each part
    return WhenceError(f"{name} is {reprlib.repr(first['input'])}; {' or '.join(dict.fromkeys(same))} is needed.")
