"""The embedded engine on several devices."""

import subprocess
import sys

import pytest
from families import SMALL, make_params
from processes import TESTS, environment

from focus.engine.embedded.engine import EmbeddedEngine


def test_the_engine_on_two_devices():
    tests = TESTS / "embedded_on_two_devices.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=environment(2),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "7 passed" in done.stdout


@pytest.mark.parametrize("devices", (0, -2, 5))
def test_a_number_of_devices_that_cannot_be_is_refused(devices):
    with pytest.raises(ValueError, match=rf"devices must be -1 or lie in .*got {devices}"):
        EmbeddedEngine(SMALL, make_params(SMALL), decode=str, devices=devices, max_running=4)
