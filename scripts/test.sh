#!/usr/bin/env bash
# Sets up with the dev extras and runs the tests:  bash scripts/test.sh [PYTEST ARGUMENTS]
# Those marked `long` and `sglang` are left out; these run them alone, the second with the real
# server, which it installs the first time (four minutes), one after the other:
#   bash scripts/test.sh -m long
#   bash scripts/test.sh -m sglang -n 0
source "$(dirname "$0")/setup.sh" dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/basedpyright
exec .venv/bin/python -m pytest -m "not long and not sglang" \
  -n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile --durations=25 "$@"
