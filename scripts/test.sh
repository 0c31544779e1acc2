#!/usr/bin/env bash
# Sets up with the dev extras and runs the tests:  bash scripts/test.sh [PYTEST ARGUMENTS]
# Those marked `long` are left out; `bash scripts/test.sh -m long` runs them alone.
source "$(dirname "$0")/setup.sh" dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -m "not long" -n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile "$@"
