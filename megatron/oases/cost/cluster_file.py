"""Reading cluster files (YAML). Nothing in one is ignored: a key that is unknown, missing or given twice is refused."""

import os
from pathlib import Path

import yaml

from megatron.oases.cost.cluster import Cluster
from megatron.oases.cost.records import from_json, versioned
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
    content = versioned(_parse(path), path, version=VERSION)
    return from_json(Cluster, {key: value for key, value in content.items() if key != "version"}, str(path))


def _resolve(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    names = shipped_clusters()
    if text in names:
        return _SHIPPED / f"{text}.yaml"
    if os.path.isfile(text):
        return Path(text)
    what = "is a folder" if os.path.isdir(text) else "is no file"
    shipped = f"shipped are {', '.join(names)}" if names else f"no shipped ones lie in {_SHIPPED}"
    raise UsageError(f"cluster {text} {what}, nor the name of a shipped cluster; {shipped}")


def _parse(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}: not valid YAML{where}: {error.problem}") from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


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
