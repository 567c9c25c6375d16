#!/usr/bin/env bash
# Makes the Python environment .venv in the repository, once; instant when it is there and current.
#   PYTHON=/path/to/python   the Python to use (3.12 or 3.13) instead of the first one found
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly VENV=.venv STAMP=.venv/.oases-installed UNFINISHED=.venv.unfinished LOG=.venv/.oases-setup.log

# megatron-core has wheels for these versions only.
readonly RIGHT_VERSION='import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))'

# What the environment was made from; a changed dependency list or a moved repository makes it anew.
fingerprint() {
    { pwd -P; cat pyproject.toml setup.py; } | sha256sum | cut -d' ' -f1
}

is_current() {
    [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint)" ]
}

# A command that is found may still not run: pyenv has a stand-in for versions that are not selected.
is_right_python() {
    "$1" -c "$RIGHT_VERSION" >/dev/null 2>&1
}

candidates() {
    printf '%s\n' python3.12 python3.13 python3
    local root
    if root=$(pyenv root 2>/dev/null); then
        printf '%s\n' "$root"/versions/3.12*/bin/python "$root"/versions/3.13*/bin/python
    fi
    uv python find '>=3.12,<3.14' 2>/dev/null || true
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_right_python "$PYTHON" && echo "$PYTHON" && return
        echo "error: PYTHON=$PYTHON is not a Python 3.12 or 3.13 that runs" >&2
        return 1
    fi
    local candidate
    while read -r candidate; do
        if is_right_python "$candidate" && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done < <(candidates)
    echo "error: no Python 3.12 or 3.13 with the module venv found (looked at PATH, pyenv and uv)." >&2
    echo "Install one (apt-get install python3.13 python3.13-venv, pyenv install 3.12, uv python install 3.12)" >&2
    echo "or name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh" >&2
    return 1
}

# Everything goes to the log; of it, where pip is: one changing line on a terminal, a line now and then elsewhere.
# Unpacking takes pip minutes without a word, hence the time limit on reading.
show_progress() {
    local line step=Starting status start=$SECONDS shown=$SECONDS
    while true; do
        status=0
        IFS= read -r -t 2 line || status=$?
        if [ "$status" -eq 0 ]; then
            echo "$line" >>"$LOG"
            case $line in
                Collecting\ * | *Downloading\ * | *Building\ * | Installing\ collected*)
                    line=${line#"${line%%[! ]*}"}
                    line=${line%%:*}
                    step=${line%%(*} ;;
            esac
        elif [ "$status" -le 128 ]; then
            break
        fi
        if [ -t 1 ]; then
            printf '\r\033[K  %3d s  %.90s' $((SECONDS - start)) "$step"
        elif [ $((SECONDS - shown)) -ge 15 ]; then
            printf '  %3d s  %.90s\n' $((SECONDS - start)) "$step"
            shown=$SECONDS
        fi
    done
    if [ -t 1 ]; then printf '\r\033[K'; fi
}

# An environment whose making was broken off, whose Python does not run, or that we made when the repository stood
# elsewhere is not worth mending piece by piece.
is_beyond_repair() {
    [ -e "$UNFINISHED" ] || ! "$VENV/bin/python" -c '' 2>/dev/null \
        || { [ -e "$STAMP" ] && ! grep -qF "$(pwd -P)/$VENV" "$VENV/bin/activate"; }
}

install() {
    local start=$SECONDS python
    if [ -L "$VENV" ]; then
        echo "error: $VENV is a link to $(readlink "$VENV"), an environment made for something else. Remove it: rm $VENV" >&2
        return 1
    fi
    if [ ! -e "$VENV" ] || is_beyond_repair; then
        python=$(find_python)
        echo "Making $VENV with $("$python" --version): about 5 GB, a minute or more"
        touch "$UNFINISHED"
        "$python" -m venv --clear "$VENV"
    elif ! is_right_python "$VENV/bin/python"; then
        echo "error: $VENV holds $("$VENV/bin/python" --version); 3.12 or 3.13 is needed. Remove it: rm -r $VENV" >&2
        return 1
    else
        echo "Bringing $VENV up to date"
        touch "$UNFINISHED"
    fi
    rm -f "$STAMP"
    : >"$LOG"
    # Environments made by uv come without pip.
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >>"$LOG" 2>&1
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off -e '.[dev]' 2>&1 \
        | show_progress; then
        rm -f "$UNFINISHED"  # pip that fails by itself leaves no package half installed
        echo "error: pip failed; the end of $LOG:" >&2
        grep -v '^WARNING' "$LOG" | tail -n 15 >&2
        return 1
    fi
    # From another folder, or the repository's own would be found without having been installed.
    if ! (cd / && "$OLDPWD/$VENV/bin/python" -c 'import sys
from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("torch", "megatron.core", "megatron.training", "megatron.oases"))))'); then
        echo "error: $VENV is made, but torch, megatron.core, megatron.training or megatron.oases is missing in it" >&2
        return 1
    fi
    fingerprint >"$STAMP"
    rm -f "$UNFINISHED"
    echo "Ready after $((SECONDS - start)) s"
}

is_current && exit 0
# Two at once: the second waits, then finds the work done.
exec 9>.venv.lock
if ! flock -n 9; then
    echo "Waiting for another scripts/setup.sh"
    flock 9
fi
is_current && exit 0
install
