"""What tests of whole runs share: compiled programs, warm starts and finished runs."""

import contextlib
import dataclasses
import fcntl
import gc
import os
import tempfile
from pathlib import Path

# Read when JAX is imported. Entries are named by their content, so that nothing goes stale.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/focus-tests-{os.getuid()}-jax"
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import pytest

REPOSITORY = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that has finished."""

    config: object
    workdir: Path
    summary: dict


@contextlib.contextmanager
def _locked(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Every compiled program is mapped into memory in pieces, and a process may have 65,530 of them. At
# the limit XLA ends it.
MOST_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_maps():
    """Lets go of compiled programs before a process that ran many files has too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """Where warm starts are kept: $FOCUS_CACHE if it is set, or a place of this session.

    Subprocesses find it in the environment.
    """
    if "FOCUS_CACHE" in os.environ:
        directory = Path(os.environ["FOCUS_CACHE"])
    else:
        root = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            root = root.parent  # the workers of one session share what is above their own
        directory = root / "focus-cache"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOCUS_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def prepare(cache_dir):
    """Function from a config to its environment and warm start, made once a session."""
    from focus.run import experiment, warm_start

    def prepared(config):
        env = experiment.make_env(config)
        with _locked(cache_dir / ".lock"):
            return env, warm_start.load_or_make(config, env)

    return prepared


@pytest.fixture(scope="session")
def finished(prepare, tmp_path_factory):
    """Function from a method and overrides to its run, which is played once a session."""
    import tiny

    from focus.train import train

    runs = {}

    def run(method="focus", **overrides):
        name = "-".join([method, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
        if name not in runs:
            config = tiny.get_config(method)
            config.update_from_flattened_dict(overrides)
            prepare(config)
            workdir = tmp_path_factory.mktemp(method)
            runs[name] = Run(config, workdir, train(config, workdir))
        return runs[name]

    return run


@pytest.fixture(scope="session")
def real_fleet(tmp_path_factory):
    """Two workers of the unmodified SGLang with three versions of a small model, and its router."""
    import backends

    with backends.real_fleet(tmp_path_factory.mktemp("sglang")) as fleet:
        yield fleet
