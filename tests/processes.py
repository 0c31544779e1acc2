"""Programs of tests in processes of their own: on many virtual devices, or several together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from focus.learner.sharding import CPU_THREADS_PER_DEVICE

TESTS = Path(__file__).parent

# First lines of a program that `together` runs: its process joins the others.
JOIN = """
import sys
from focus.learner import hosts
address, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    hosts.initialize(address, count, index)
"""


def environment(devices):
    """Variables of a process that has some virtual CPU devices and finds tests and project."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PJRT_NPROC": str(CPU_THREADS_PER_DEVICE * devices),
        # Little optimisation: these programs run a few times, compiling them is what costs.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_program(source, *arguments, devices=8, timeout=600):
    """What a program prints; fails with its last words unless it ends well."""
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def together(source, *arguments, processes=2, devices=8):
    """Runs a program in several processes that share `devices`: (stdout, stderr, code) of each."""
    address = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", source, address, str(processes), str(i), *map(str, arguments)],
            env=environment(devices // processes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        return [(*p.communicate(timeout=400), p.returncode) for p in started]
    finally:
        for process in started:
            process.kill()
