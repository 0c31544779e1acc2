#!/usr/bin/env bash
# SGLang for rollouts on GPUs: one worker for every TP GPUs, the router in front, until Ctrl-C.
#
#   MODEL=/shared/models/qwen3.5-9b bash scripts/serve_sglang.sh [FLAGS OF sglang.launch_server]
#
# The servers have an environment of their own, because their torch and JAX do not go together:
#   python3 -m venv sglang-env && sglang-env/bin/pip install 'sglang==0.5.23' 'sglang-router==0.3.2'
#
# Settings, with defaults for a 9B model on GPUs of 80 GB:
#   SGLANG_PYTHON  python of that environment                       sglang-env/bin/python
#   GPUS           how many to use                                  all of this machine
#   TP             GPUs of one worker; 1 as long as the model fits  1
#   PORT           of the router; workers take the next ones        30000
#   HOST           address to listen on                             0.0.0.0
#   CONTEXT        model.max_context of the run                     32768
#   RUNNING        requests that a worker decodes at once           256
#   VERSION        name of the weights it starts with               launch
#   LORA_RANK      learner.lora.rank of a run that pushes adapters  0: none
#   LORA_TARGETS   projections that its adapters may sit on         all of a dense model
#   LOGS           directory of the logs                            runs/sglang
#
# A run then takes rollout.urls (the workers) and rollout.router_url; scripts/check_server.py tells
# whether the fleet is fit. Weights come through a directory that learner and workers both see.
# Whoever reaches these ports can load weights: keep them inside a private network.
set -euo pipefail

: "${MODEL:?set MODEL to the directory of the model}"
python="${SGLANG_PYTHON:-sglang-env/bin/python}"
tp="${TP:-1}"
port="${PORT:-30000}"
host="${HOST:-0.0.0.0}"
context="${CONTEXT:-32768}"
logs="${LOGS:-runs/sglang}"
gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
workers=$((gpus / tp))
if ((workers < 1)); then
  echo "GPUS=$gpus is less than TP=$tp: there is no room for a worker" >&2
  exit 1
fi
if [[ "$host" == 0.0.0.0 ]]; then here=127.0.0.1; else here="$host"; fi
mkdir -p "$logs"

flags=(
  --model-path "$MODEL" --host "$host" --tp-size "$tp" --dtype bfloat16
  # Replies and probes name it; a worker that restarts is recognised by it and loaded anew.
  --weight-version "${VERSION:-launch}"
  # Six tokens of the context are the server's own.
  --context-length "$((context + 8))"
  # Log-probs are differences of large numbers: in bfloat16 the last product alone costs 1e-2.
  --enable-fp32-lm-head
  # Requests say everything themselves; a generation_config.json beside the model must not.
  --sampling-defaults openai
  # Prefixes: the radix cache stays on, and those who find the most in it go first.
  --schedule-policy lpm
  --mem-fraction-static 0.85 --chunked-prefill-size 8192
  --max-running-requests "${RUNNING:-256}"
  # A queue that is full says 503, and the client asks another worker.
  --max-queued-requests "$((4 * ${RUNNING:-256}))"
  # A worker that hangs ends itself and is restarted by whoever watches it.
  --watchdog-timeout 300
  --enable-metrics
)

if ((${LORA_RANK:-0})); then
  # For rollout.push=adapter. SGLang 0.5.23 has no place for adapters on in_proj_* of Qwen3.5: leave
  # those out of learner.lora.targets, and out_proj too, unless LORA_TARGETS=all.
  read -ra targets <<< "${LORA_TARGETS:-q_proj k_proj v_proj o_proj gate_proj up_proj down_proj}"
  flags+=(
    --enable-lora --max-lora-rank "$LORA_RANK" --lora-target-modules "${targets[@]}"
    # Places on the GPU: the adapter of now, two that long requests began with, and none at all,
    # which health checks ask for.
    --max-loras-per-batch 4
  )
fi

pids=()
stop() {
  trap - INT TERM EXIT
  ((${#pids[@]})) && kill "${pids[@]}" 2> /dev/null
  wait
}
trap stop INT TERM EXIT

# An answer to /health takes the server a second: it samples a token.
await() { # NAME PID URL
  echo "waiting for $1 at $3 ..." >&2
  until curl --silent --fail --max-time 30 --output /dev/null "$3/health"; do
    if ! kill -0 "$2" 2> /dev/null; then
      echo "$1 has ended; its log:" >&2
      tail -n 20 "$logs/$1.log" >&2
      exit 1
    fi
    sleep 2
  done
}

urls=()
for ((i = 0; i < workers; i++)); do
  first=$((i * tp))
  devices="$(seq -s, "$first" $((first + tp - 1)))"
  CUDA_VISIBLE_DEVICES="$devices" SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 \
    "$python" -m sglang.launch_server --port $((port + 1 + i)) "${flags[@]}" "$@" \
    > "$logs/worker-$i.log" 2>&1 &
  pids+=($!)
  urls+=("http://$here:$((port + 1 + i))")
done
for ((i = 0; i < workers; i++)); do await "worker-$i" "${pids[i]}" "${urls[i]}"; done

# cache_aware sends a prompt to the worker that holds its prefix, unless that one is overloaded.
"$python" -m sglang_router.launch_router --host "$host" --port "$port" --policy cache_aware \
  --worker-urls "${urls[@]}" > "$logs/router.log" 2>&1 &
pids+=($!)
await router "${pids[workers]}" "http://$here:$port"

echo "rollout.router_url=http://$here:$port"
echo "rollout.urls=$(IFS=,; echo "${urls[*]}")"
# Without one of them the rest goes on: the client leaves out what does not answer.
wait
