# Sourced by the other scripts: makes .venv and installs the package with the extras in $1 ("" or
# "dev"). A second run with an unchanged setup.py and the same PYTHON reuses what is there; without
# PYTHON it keeps the one that .venv was made with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
  python=python3
  [[ ! -x .venv/bin/python ]] || python=.venv/bin/python
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "focus needs Python >= 3.11; $python is $("$python" --version). Set PYTHON=/path/to/python3.11" >&2
  exit 1
fi
extras="${1:-}"
stamp=".venv/.installed${extras:+-$extras}"
which_python='import sys; print(sys.version.split()[0], sys.base_prefix)'
chosen="$("$python" -c "$which_python")"
wanted="$chosen $(cksum < setup.py)"
if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
  echo "installing focus${extras:+[$extras]} into .venv ..." >&2
  if [[ "$(.venv/bin/python -c "$which_python" 2> /dev/null || true)" != "$chosen" ]]; then
    # None yet, or one of another Python: packages of both would not go together.
    "$python" -m venv --clear .venv
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
  echo "$wanted" > "$stamp"
fi
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
# XLA's temporaries on a CPU are large and short-lived: keep the memory, in huge pages, instead of
# giving it back to the kernel and having it zeroed again. Read by glibc alone.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864}"
