#!/usr/bin/env bash
# Sets up with the dev extras and runs the tests:  bash scripts/test.sh [PYTEST ARGUMENTS]
source "$(dirname "$0")/setup.sh" dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile "$@"
