"""scripts/setup.sh: what it does before and without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the script calls; nothing else is on the path of the tests below, above all no Python.
COMMANDS = ["bash", "cat", "cut", "dirname", "flock", "grep", "readlink", "rm", "sha256sum", "tail", "touch"]


@pytest.fixture
def repository(tmp_path):
    """A repository with nothing but what the script reads, and a folder of commands."""
    root = tmp_path / "repository"
    (root / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return root


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def fake_python(path: Path, *, pip_exit_code: int = 0) -> None:
    """A real Python that only pretends to make environments and to install."""
    script(path, f"""
case "$*" in
    *"-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python
                 echo "$PWD/.venv" > .venv/bin/activate; echo venv >> calls ;;
    *"-m pip install"*) echo pip >> calls; echo "Collecting everything"; echo "it went wrong"; exit {pip_exit_code} ;;
    *find_spec*) ;;
    *) exec {sys.executable} "$@" ;;
esac""")


def setup(repository: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=repository, capture_output=True, text=True, timeout=120,
        env={"PATH": f"{repository.parent / 'bin'}", "HOME": str(repository.parent), **environment})


def calls(repository: Path) -> list[str]:
    path = repository / "calls"
    return path.read_text().split() if path.exists() else []


@pytest.fixture
def with_mkdir_and_cp(repository):
    for name in ("mkdir", "cp"):
        (repository.parent / "bin" / name).symlink_to(shutil.which(name))
    return repository


def test_says_what_is_missing_without_a_python(repository):
    result = setup(repository)
    assert result.returncode == 1
    assert "no Python 3.12 or 3.13" in result.stderr and "PYTHON=" in result.stderr
    assert not (repository / ".venv").exists()


def test_refuses_a_named_python_that_does_not_fit(repository):
    script(repository.parent / "old", "exit 1")
    result = setup(repository, PYTHON=str(repository.parent / "old"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: PYTHON=") and "3.12 or 3.13" in result.stderr


def test_leaves_alone_an_environment_that_it_is_linked_to(repository):
    other = repository.parent / "other"
    other.mkdir()
    (other / "precious").touch()
    (repository / ".venv").symlink_to(other)
    result = setup(repository)
    assert result.returncode == 1
    assert f".venv is a link to {other}" in result.stderr
    assert (other / "precious").exists()


def test_passes_over_commands_that_do_not_run(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    # As pyenv's stand-ins for versions that are not selected.
    script(repository.parent / "bin/python3.12", "echo 'command not found' >&2; exit 127")
    fake_python(repository.parent / "bin/python3.13")
    result = setup(repository)
    assert result.returncode == 0, result.stderr
    assert calls(repository) == ["venv", "pip"]


def test_finds_the_versions_of_pyenv(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    script(repository.parent / "bin/pyenv", f"echo {repository.parent}/pyenv")
    fake_python(repository.parent / "pyenv/versions/3.12.9/bin/python")
    assert setup(repository).returncode == 0
    assert calls(repository) == ["venv", "pip"]


def test_second_run_does_nothing_until_the_dependencies_change(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    fake_python(repository.parent / "bin/python3.12")
    assert setup(repository).returncode == 0
    again = setup(repository)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert calls(repository) == ["venv", "pip"]
    with (repository / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert setup(repository).returncode == 0
    assert calls(repository) == ["venv", "pip", "pip"]


def test_unfinished_environment_is_made_anew(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    fake_python(repository.parent / "bin/python3.12")
    (repository / ".venv/bin").mkdir(parents=True)  # no Python in it
    assert setup(repository).returncode == 0
    assert calls(repository) == ["venv", "pip"]
    # As a run that is killed leaves it.
    (repository / ".venv/.oases-installed").unlink()
    (repository / ".venv.unfinished").touch()
    assert setup(repository).returncode == 0
    assert calls(repository) == ["venv", "pip"] * 2


def test_moved_repository_makes_its_environment_anew(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    fake_python(repository.parent / "bin/python3.12")
    assert setup(repository).returncode == 0
    moved = repository.rename(repository.parent / "moved")
    assert setup(moved).returncode == 0
    assert calls(moved) == ["venv", "pip"] * 2


def test_failed_installation_shows_why_and_is_tried_again(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    fake_python(repository.parent / "bin/python3.12", pip_exit_code=1)
    for _ in range(2):
        result = setup(repository)
        assert result.returncode == 1
        assert "error: pip failed" in result.stderr and "it went wrong" in result.stderr
    # The environment itself was whole: only pip is called again.
    assert calls(repository) == ["venv", "pip", "pip"]


def test_two_at_once_install_once(with_mkdir_and_cp):
    repository = with_mkdir_and_cp
    fake_python(repository.parent / "bin/python3.12")
    environment = {"PATH": f"{repository.parent / 'bin'}", "HOME": str(repository.parent)}
    both = [subprocess.Popen(["bash", "scripts/setup.sh"], cwd=repository, env=environment, stdout=subprocess.DEVNULL)
            for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert calls(repository) == ["venv", "pip"]


def test_scripts_can_be_executed():
    for name in ("scripts/setup.sh", "scripts/test.sh", "scripts/quickstart.sh", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
