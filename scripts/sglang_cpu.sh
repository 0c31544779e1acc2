#!/usr/bin/env bash
# The unmodified SGLang on a machine without a GPU, for tests and configs/quickstart_sglang.py:
#
#   bash scripts/sglang_cpu.sh install              prints the directory of its environment
#   bash scripts/sglang_cpu.sh server --model-path DIR --port P [FLAGS OF sglang.launch_server]
#   bash scripts/sglang_cpu.sh router --worker-urls URL URL --port P [FLAGS OF sglang_router]
#   bash scripts/sglang_cpu.sh fleet --model-path DIR [FLAGS OF sglang.launch_server]
#
# A fleet is a router at ${PORT:-30000} and two workers at the next ports, until Ctrl-C. Contexts are
# the model's; a run that uses all of them needs --context-length with 8 more. One that pushes
# adapters needs --enable-lora --max-lora-rank R --lora-target-modules q_proj k_proj ...
#
# Its torch and JAX do not go together, so it has an environment of its own, kept in
# ${FOCUS_CACHE:-~/.cache/focus} under a hash of what is installed: four minutes the first time.
set -euo pipefail

requirements() {
  # One line is one call of pip; --no-deps because the package asks for GPU kernels.
  cat <<'REQUIREMENTS'
torch==2.13.0
--no-deps sglang==0.5.23 triton==3.8.0 torchvision==0.28.0
transformers==5.19.0 tokenizers==0.23.2 aiohttp fastapi uvicorn uvloop requests orjson msgspec numpy psutil pybase64 pydantic pyzmq pillow einops IPython setproctitle partial_json_parser prometheus-client python-multipart packaging regex scipy tqdm xxhash zstandard interegular dill apache-tvm-ffi==0.1.11 sentencepiece openai==2.8.0 openai-harmony==0.0.4 anthropic tiktoken gguf compressed-tensors==0.18.0 jsonschema soundfile watchfiles xgrammar==0.2.7
sglang-router==0.3.2
REQUIREMENTS
}

launcher() {
  # Runs a module of SGLang after the parts are in place that its imports look for and a CPU never
  # calls. Children that it spawns import this file again, so that they find them too.
  cat <<'LAUNCHER'
import runpy
import sys
import types

import torch

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

kernels = types.ModuleType("vllm._custom_ops")
for name in ("rotary_embedding", "rms_norm", "fused_add_rms_norm"):
    setattr(kernels, name, None)
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm._custom_ops"] = sys.modules["vllm"]._custom_ops = kernels

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=False)
LAUNCHER
}

lora_launcher() {
  # Adapters lie in memory that is pinned for copies to a GPU; without one any memory will do.
  cat <<'LAUNCHER'
import torch


def unpinned(make):
    return lambda *args, pin_memory=False, **options: make(*args, **options)


for maker in ("arange", "empty", "tensor", "zeros"):
    setattr(torch, maker, unpinned(getattr(torch, maker)))
torch.Tensor.pin_memory = lambda tensor: tensor

LAUNCHER
  launcher
}

python="${PYTHON:-python3}"
hash="$({ requirements; launcher; "$python" --version; } | sha256sum | cut -c1-16)"
environment="${FOCUS_CACHE:-$HOME/.cache/focus}/sglang-$hash"

install() {
  mkdir -p "$environment"
  exec 9> "$environment/.lock"
  flock 9 # of two that install at once the second finds everything done
  if [[ ! -f "$environment/.installed" ]]; then
    echo "installing SGLang for the CPU into $environment; the log is install.log there ..." >&2
    local began=$SECONDS
    {
      "$python" -m venv --clear "$environment/venv"
      launcher > "$environment/launch.py"
      while read -r line; do
        # Word splitting is wanted: a line holds several arguments.
        # shellcheck disable=SC2086
        "$environment/venv/bin/python" -m pip install --disable-pip-version-check $line
      done < <(requirements)
    } > "$environment/install.log" 2>&1 || {
      tail -n 20 "$environment/install.log" >&2
      exit 1
    }
    echo "$((SECONDS - began)) s" > "$environment/.installed"
  fi
  exec 9>&-
}

launch() { # MODULE FLAGS...: replaces this shell, so that a signal reaches the server itself
  # Contexts are a little longer than the model's, because the server keeps six tokens back.
  export SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  local program="$environment/launch.py"
  if [[ " $* " == *" --enable-lora "* ]]; then
    program="$environment/launch_lora.py"
    lora_launcher > "$program.$$"
    mv "$program.$$" "$program" # another worker may be reading it
    set -- "$@" --lora-backend torch_native
  fi
  exec "$environment/venv/bin/python" "$program" "$@"
}

case "${1:-}" in
  install)
    install
    echo "$environment"
    ;;
  server)
    shift
    install
    # Without --max-total-tokens it reserves 14 GB for keys and values; without --sleep-on-idle an
    # idle server keeps a core busy.
    launch sglang.launch_server --device cpu --attention-backend torch_native \
      --sampling-backend pytorch --grammar-backend none --dtype float32 --host 127.0.0.1 \
      --max-total-tokens 16384 --max-running-requests 16 --mem-fraction-static 0.3 \
      --sleep-on-idle "$@"
    ;;
  router)
    shift
    install
    launch sglang_router.launch_router --host 127.0.0.1 "$@"
    ;;
  fleet)
    shift
    install
    port="${PORT:-30000}"
    urls=("http://127.0.0.1:$((port + 1))" "http://127.0.0.1:$((port + 2))")
    pids=()
    trap 'trap - INT TERM EXIT; kill "${pids[@]}" 2> /dev/null || true; wait' INT TERM EXIT
    for url in "${urls[@]}"; do
      bash "$0" server --port "${url##*:}" "$@" &
      pids+=($!)
    done
    for i in 0 1; do
      until curl --silent --fail --max-time 30 --output /dev/null "${urls[i]}/health"; do
        kill -0 "${pids[i]}" # the worker has ended: its last words are above
        sleep 1
      done
    done
    bash "$0" router --port "$port" --policy cache_aware --worker-urls "${urls[@]}" &
    pids+=($!)
    wait
    ;;
  *)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
