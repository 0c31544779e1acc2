"""The quickstart with its rollouts on SGLang: two workers on this machine's CPU and a router.

    python scripts/export_model.py --config configs/quickstart_sglang.py --out models/quickstart
    bash scripts/sglang_cpu.sh fleet --model-path models/quickstart --context-length 392
    python scripts/train.py --config configs/quickstart_sglang.py --workdir runs/quickstart-sglang

The second command installs SGLang the first time, takes a minute or two to start, and stays; the
third goes into another terminal. A worker may be killed and started again at any time:

    bash scripts/sglang_cpu.sh server --port 30001 --model-path models/quickstart \\
        --context-length 392

Servers with GPUs take the place of these with --config.rollout.urls and
--config.rollout.router_url, see scripts/serve_sglang.sh; whether they are fit tells

    python scripts/check_server.py http://127.0.0.1:30001 http://127.0.0.1:30002 \\
        --router-url http://127.0.0.1:30000 --model-path models/quickstart

The argument names the method, as in configs/quickstart.py. On two cores the servers share what the
trainer has in the quickstart: expect several times its time.
"""

import runpy
from pathlib import Path

import ml_collections

# By its path, as config files themselves are read: `configs` is no installed package.
_QUICKSTART = runpy.run_path(str(Path(__file__).with_name("quickstart.py")))

METHODS = _QUICKSTART["METHODS"]


def get_config(method: str = "focus") -> ml_collections.ConfigDict:
    """The configuration of `method`; all but where tokens are sampled is the quickstart's."""
    c = _QUICKSTART["get_config"](method)
    c.rollout.engine = "sglang"
    c.rollout.urls = ("http://127.0.0.1:30001", "http://127.0.0.1:30002")
    c.rollout.router_url = "http://127.0.0.1:30000"
    c.rollout.max_running = 32  # the two workers decode 16 each
    return c
