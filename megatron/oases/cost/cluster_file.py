"""Reading cluster files (YAML). Nothing in one is ignored: a key that is unknown, missing or given twice is refused."""

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import yaml

from megatron.oases.cost.cluster import Cluster
from megatron.oases.errors import UsageError

VERSION = 1
_SHIPPED = Path(__file__).parents[3] / "clusters"


def shipped_clusters() -> list[str]:
    """The names of the cluster files that come with Oases."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Reads a cluster file.

    Args:
        name_or_path: the name of a shipped file, such as `rtx3090x4`, or the path of any other.

    Raises:
        UsageError: one line with the file, the key and its value.
    """
    path = _resolve(name_or_path)
    content = _parse(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping of keys, but is {_described(content)}", every_rank=False)
    content = dict(content)
    version = content.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        found = "is missing" if version is None else f"is {version!r}"
        raise UsageError(f"{path}: version {found}, must be {VERSION}", every_rank=False)
    try:
        return _build(Cluster, content, "")
    except ValueError as error:
        raise UsageError(f"{path}: {error}", every_rank=False) from None


def _resolve(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    names = shipped_clusters()
    if text in names:
        return _SHIPPED / f"{text}.yaml"
    path = Path(text)
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "is no file"
    shipped = f"shipped are {', '.join(names)}" if names else f"no shipped ones lie in {_SHIPPED}"
    raise UsageError(f"cluster {text} {what}, nor the name of a shipped cluster; {shipped}", every_rank=False)


def _parse(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}: not valid YAML{where}: {error.problem}", every_rank=False) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}", every_rank=False) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys, silently."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _build(cls: type, raw: object, prefix: str):
    """A dataclass from a mapping. Errors are `ValueError`s that begin with the key's path."""
    if not isinstance(raw, dict):
        raise ValueError(f"{prefix.rstrip('.')} must be a mapping of keys, but is {_described(raw)}")
    known = {field.name: field for field in fields(cls)}
    for key in raw:
        if key not in known:
            raise ValueError(f"{prefix}{key} is unknown, the keys here are {', '.join(known)}")
    for key, field in known.items():
        if key not in raw and field.default is MISSING:
            raise ValueError(f"{prefix}{key} is missing")
    wanted = typing.get_type_hints(cls)
    values = {key: _convert(wanted[key], value, prefix + key) for key, value in raw.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _convert(wanted: object, raw: object, path: str):
    if isinstance(wanted, types.UnionType):  # Link | None: an absent key is the None
        (wanted,) = (option for option in typing.get_args(wanted) if option is not type(None))
    if is_dataclass(wanted):
        return _build(wanted, raw, f"{path}.")
    if typing.get_origin(wanted) is dict:
        if not isinstance(raw, dict):
            raise ValueError(f"{path} must be a mapping of keys, but is {_described(raw)}")
        _, of = typing.get_args(wanted)
        return {str(key): _convert(of, value, f"{path}.{key}") for key, value in raw.items()}
    accepted = (int, float) if wanted is float else (wanted,)
    if not isinstance(raw, accepted) or isinstance(raw, bool):
        names = {int: "a whole number", float: "a number", str: "text"}
        raise ValueError(f"{path} must be {names[wanted]}, but is {_described(raw)}")
    return float(raw) if wanted is float else raw


def _described(raw: object) -> str:
    if raw is None:
        return "empty"
    kinds = {dict: "a mapping", list: "a list", str: "the text", bool: "the truth value"}
    kind = kinds.get(type(raw), "the value")
    return kind if isinstance(raw, dict | list) else f"{kind} {raw!r}"
