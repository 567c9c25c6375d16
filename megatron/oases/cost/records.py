"""Frozen dataclasses from what JSON or YAML holds and back, with every key, type and number checked.

A file that was written by hand, by another version or with other units must not pass as the one that is meant. So
nothing is converted, only a field that has a default may be left out, and the message names the file and the key.
"""

import dataclasses
import json
import os
import sys
import types
import typing
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from megatron.oases.errors import UsageError

T = TypeVar("T")
_LARGEST = 2**63 - 1
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}


def from_json(kind: type[T], value: Any, where: str) -> T:
    """The object of type `kind` that `value`, as `json` or `yaml` reads it, describes.

    Args:
        kind: a dataclass, an enum (by value), int, float, bool, str, a tuple of one type, a dict from str to one type,
            or one of these or None.
        value: what stands in the file.
        where: the file, and the key in it, for the message.

    Raises:
        UsageError: a key is missing or unknown, or a value has another type, is not finite, or is refused by the
            dataclass.
    """
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
        return from_json(kind, value, where)
    if origin is tuple:
        _require(isinstance(value, list), f"{where} must be a list, not {_shown(value)}")
        element = typing.get_args(kind)[0]
        return tuple(from_json(element, entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), f"{where} must be an object, not {_shown(value)}")
        _, element = typing.get_args(kind)
        return {key: from_json(element, entry, f"{where}: {key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if issubclass(kind, Enum):
        known = [member.value for member in kind]
        _require(value in known, f"{where} is {_shown(value)}, must be one of {', '.join(known)}")
        return kind(value)
    is_right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    _require(is_right, f"{where} must be {_NAMES[kind]}, not {_shown(value)}")
    is_finite = kind is not float or abs(value) <= sys.float_info.max
    _require(is_finite, f"{where} must be a finite number, not {_shown(value)}")
    _require(kind is not int or abs(value) <= _LARGEST, f"{where} must fit into 64 bits, not {_shown(value)}")
    return float(value) if kind is float else value


def _record(kind: type[T], value: Any, where: str) -> T:
    _require(isinstance(value, dict), f"{where} must be an object, not {_shown(value)}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING
        _require(field.name in value or has_default, f"{where}: {field.name} is missing")
    for name in value:
        _require(name in names, f"{where}: {name} is unknown; there are {', '.join(names)}")
    given = {name: from_json(hints[name], entry, f"{where}: {name}") for name, entry in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def to_json(value: Any) -> Any:
    """What `json` writes so that `from_json` reads it back."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    return value


def read_json_object(path: Path, *, version: int) -> dict:
    """Reads a JSON object and checks its version. Raises `UsageError`."""
    try:
        data = json.loads(path.read_text(), object_pairs_hook=_unique)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {' '.join(str(error).split())}") from None
    return versioned(data, path, version=version)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`json` by itself takes the last of two equal keys, silently."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key} is given twice")
        found[key] = value
    return found


def versioned(data: Any, path: Path, *, version: int) -> dict:
    """What a file holds, if that is an object of this version. Raises `UsageError`."""
    _require(isinstance(data, dict), f"{path} must hold an object, not {_shown(data)}")
    found = data.get("version")
    is_right = found == version and not isinstance(found, bool)
    _require(is_right, f"{path}: version is {_shown(found)}; this tool reads version {version}")
    return data


def write_json_object(path: Path, data: dict) -> None:
    """Replaces the file in one step: who reads it meanwhile sees the old or the new one, whole.

    Raises:
        UsageError: it cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise UsageError(f"{path} cannot be written: {error.strerror}", every_rank=False) from None


def first_difference(ours: object, theirs: object, *, but: tuple[str, ...] = ()) -> str | None:
    """`name is A, here B` of the first field in which two dataclasses of one type, or two dicts, differ, or None.

    Args:
        ours: what a file says.
        theirs: what is wanted here.
        but: fields that may differ.
    """
    mine, others = (each if isinstance(each, dict) else vars(each) for each in (ours, theirs))
    for name in {**mine, **others}:
        if name not in but and mine.get(name) != others.get(name):
            return f"{name} is {mine.get(name)}, here {others.get(name)}"
    return None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _shown(value: Any) -> str:
    """Short, as the file has it; Python refuses to write out some thousand digits."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
