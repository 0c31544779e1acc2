"""scripts/setup.sh: what it installs, when, and with which Python. No package is fetched."""

import os
import shutil
import subprocess

import pytest
from conftest import REPOSITORY

import focus

# A Python that writes down what it is asked for. A .venv that it makes holds a copy of it.
FAKE = """#!/usr/bin/env bash
case "$1" in
  -c) [[ "$2" == *base_prefix* ]] && echo "{version} /opt/{version}"; exit 0;;
  -m) echo "{version} $*" >> calls
      if [[ "$2" == venv ]]; then
        for last; do :; done
        rm -rf "$last"; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"
      fi;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Function that runs the script with a Python of a version, None for what it finds itself."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "setup.py").write_text("one")
    pythons = tmp_path / "pythons"
    pythons.mkdir()
    for version in ("3.11.9", "3.12.4"):
        for name in (f"python{version}", *(["python3"] if version == "3.11.9" else [])):
            (pythons / name).write_text(FAKE.format(version=version))
            (pythons / name).chmod(0o755)

    def run(version=None, extras=""):
        env = {k: v for k, v in os.environ.items() if k != "PYTHON"}
        env["PATH"] = f"{pythons}:{env['PATH']}"
        if version is not None:
            env["PYTHON"] = str(pythons / f"python{version}")
        (tmp_path / "calls").write_text("")
        command = ["bash", "-c", f"source scripts/setup.sh '{extras}'"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split()[:3] for line in (tmp_path / "calls").read_text().splitlines()]

    run.directory = tmp_path
    return run


def test_another_python_makes_the_environment_anew(setup):
    new = [["3.11.9", "-m", "venv"], ["3.11.9", "-m", "pip"]]
    assert setup() == new
    assert setup() == [] == setup("3.11.9")
    assert setup("3.12.4") == [["3.12.4", "-m", "venv"], ["3.12.4", "-m", "pip"]]
    assert setup("3.12.4") == []
    assert setup() == []  # without a wish, the Python that is there
    assert setup("3.11.9") == new


def test_extras_and_a_changed_setup_are_installed_into_what_is_there(setup):
    assert setup() and setup(extras="dev") == [["3.11.9", "-m", "pip"]]
    assert setup() == [] == setup(extras="dev")
    (setup.directory / "setup.py").write_text("two")
    assert setup() == [["3.11.9", "-m", "pip"]]


def test_the_package_has_a_name_of_its_own_and_one_version():
    source = (REPOSITORY / "setup.py").read_text()
    assert 'name="focus-rl"' in source  # "focus" on PyPI is another project
    assert f'version="{focus.__version__}"' in source


def test_nobody_is_told_to_install_another_project():
    for folder in ("focus", "scripts", "configs", "docs", "tests"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".md") and path.name != "test_setup_script.py":
                assert "install focus" not in path.read_text().replace("'", ""), path
