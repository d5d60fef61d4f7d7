"""Scripts hold flags and a call, and nothing happens at import."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import runs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cifar10"
PROGRAMS = ["train.py", "train_multi_gpu.py", "eval.py", "cifar10/__main__.py"]


def modules():
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def sibling(name):
    package, _, module = name.partition(".")
    return module.split(".")[0] if package == "cifar10" else None


def imported_siblings(path):
    """The modules of the package that a file imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "cifar10":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "cifar10."
        ):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("cifar10.")
            }
    return found - {"errors", None}


@pytest.mark.parametrize("script", ["train.py", "train_multi_gpu.py", "eval.py"])
def test_scripts_hold_flags_and_a_call(script):
    rooms = {"config", "distributed", "training", "evaluation", "tools"}
    rooms.add("run_directory")  # eval.py looks into it before TensorFlow starts.
    assert imported_siblings(ROOT / script) <= rooms
    assert len((ROOT / script).read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", modules())
def test_nothing_happens_at_import(name):
    """Modules define things; calls at the top level only build constants."""
    for node in ast.parse(modules()[name].read_text()).body:
        assert isinstance(
            node,
            ast.Import
            | ast.ImportFrom
            | ast.Assign
            | ast.AnnAssign
            | ast.FunctionDef
            | ast.AsyncFunctionDef
            | ast.ClassDef
            | ast.Expr
            | ast.If,
        )
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), "only the docstring"
        if isinstance(node, ast.If):
            allowed = {
                "__main__": "__name__ == '__main__'",
                "__init__": "sys.version_info < (3, 11)",
            }
            assert ast.unparse(node.test) in ["TYPE_CHECKING", allowed.get(name)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_older_interpreter_is_told_so(program, tmp_path):
    """Before it imports what it cannot read; the programs themselves it can."""
    path = ROOT / program
    old = "import sys; sys.version_info = (3, 10, 12, 'final', 0)"
    run = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    if path.name == "__main__.py":
        path = PACKAGE / "__init__.py"
        run = "import runpy; runpy.run_module('cifar10', run_name='__main__')"
    code = f"{old}; sys.path.insert(0, {str(ROOT)!r}); {run}"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    version = sys.version.split()[0]
    assert ended.stderr == f"Python 3.11 is needed; this is {version}.\n"
    for read in (path, PACKAGE / "__init__.py"):
        tree = ast.parse(read.read_text(), feature_version=(3, 6))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not imported, "the package's first file imports what may be newer"


def test_what_is_imported_is_declared():
    """Not only by what happens to need it, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["dependencies"]
    for packages in project["optional-dependencies"].values():
        declared += packages
    declared = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in declared}
    declared |= {"PIL", *sys.stdlib_module_names, "cifar10"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            for name in imported:
                assert name.partition(".")[0] in declared, (path, name)


def test_runpy_has_nothing_to_warn_of():
    words = ["-W", "error::RuntimeWarning", "-m", "cifar10", "doctor", "--help"]
    ended = runs.run(*words)
    assert (ended.returncode, ended.stderr) == (0, "")
