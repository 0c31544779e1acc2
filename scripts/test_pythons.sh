#!/usr/bin/env bash
# Installs focus with other Pythons and runs the tests of the pure core with each:
#   bash scripts/test_pythons.sh [PYTHON ...]
# Without arguments: every python3.12 and python3.13 that this machine has, from PATH or pyenv. One
# that is missing is said so and passed over; one that does not resolve or fails ends the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {  # python3.12 -> the first that really runs
  local version="${1#python}"
  for candidate in "$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
    if "$candidate" -c 'import venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

wanted=("$@")
[[ $# -gt 0 ]] || wanted=(python3.12 python3.13)
core=(tests/test_td.py tests/test_refine.py tests/test_branching.py tests/test_budget.py
  tests/test_primitives.py tests/test_credit_laws.py tests/test_estimators.py)
for name in "${wanted[@]}"; do
  python="$(find_python "$name")"
  if [[ -z "$python" ]]; then
    echo "$name: not on this machine, passed over" >&2
    continue
  fi
  place=".venv/pythons/$name"
  stamp="$place/.installed"
  key="$("$python" --version) $(cksum < setup.py)"
  if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$key" ]]; then
    echo "installing focus for $("$python" --version) into $place ..." >&2
    rm -rf "$place"
    "$python" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check -e . \
      pytest pytest-asyncio hypothesis
    echo "$key" > "$stamp"
  fi
  JAX_PLATFORMS=cpu "$place/bin/python" -m pytest -q "${core[@]}"
done
