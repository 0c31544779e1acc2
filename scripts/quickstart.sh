#!/usr/bin/env bash
# Sets up and trains the quickstart agent:
#   bash scripts/quickstart.sh [METHOD] [--config.key=value ...]
# METHOD is focus (default), focus_summarize, grpo, vineppo, ppo or self_credit. The run is kept in
# runs/quickstart-METHOD (set WORKDIR for another place); the same command resumes it.
# What a run that is stopped says how to go on.
export FOCUS_COMMAND="${WORKDIR:+WORKDIR=$WORKDIR }bash scripts/quickstart.sh${*:+ $(printf '%q ' "$@")}"
source "$(dirname "$0")/setup.sh" ""
method=focus
if [[ $# -gt 0 && "$1" != --* ]]; then
  method="$1"
  shift
fi
workdir="${WORKDIR:-runs/quickstart-$method}"
exec .venv/bin/python scripts/train.py --cpu-devices=2 \
  --config "configs/quickstart.py:$method" --workdir "$workdir" "$@"
