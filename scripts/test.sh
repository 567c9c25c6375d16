#!/usr/bin/env bash
# Makes the environment where needed and runs the tests, cheapest first. Arguments go to pytest, such as tests/unit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest "$@"
