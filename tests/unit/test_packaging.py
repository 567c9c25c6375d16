"""What is installed, and that Megatron's namespace stays shared."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


def test_apex_of_the_package_index_is_no_dependency():
    # That package is another program of the same name; NVIDIA's is built from source.
    assert "apex" not in names(PROJECT["dependencies"]).union(*map(names, EXTRAS.values()))


def test_pins_and_extras():
    assert PROJECT["requires-python"] == ">=3.12,<3.14"
    assert "megatron-core>=0.19.2,<0.20" in PROJECT["dependencies"]
    assert "transformer-engine" in names(EXTRAS["te"])
    assert "pytest" in names(EXTRAS["dev"])
    # It is compiled against CUDA: never part of a plain installation.
    assert "transformer-engine" not in names(PROJECT["dependencies"]) | names(EXTRAS["dev"])


def test_megatron_stays_a_namespace():
    assert not (ROOT / "megatron/__init__.py").exists()
    for folder in [ROOT / "oases_patches", *(path.parent for path in (ROOT / "megatron/oases").rglob("*.py"))]:
        assert (folder / "__init__.py").exists(), f"{folder} is no package"


@pytest.mark.parametrize("first, second", [("megatron.core", "megatron.oases"), ("megatron.oases", "megatron.core")])
def test_both_halves_import_from_any_folder(tmp_path, first, second):
    code = (f"import importlib.util as u; a = u.find_spec('{first}'); b = u.find_spec('{second}'); "
            "import megatron.oases.errors; print(a.origin, b.origin)")
    # -P: without the script's folder on the path, as for any program elsewhere.
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    origins = dict(zip((first, second), map(Path, result.stdout.split())))
    assert ROOT in origins["megatron.oases"].parents
    assert "site-packages" in origins["megatron.core"].parts
