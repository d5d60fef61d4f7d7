"""Older interpreters are refused, and what is imported is declared."""

import ast
import re
import sys
import tomllib

import runs
from runs import ROOT

PACKAGE = ROOT / "cifar10"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


DEFINITIONS = (
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef),
    *(ast.AsyncFunctionDef, ast.ClassDef, ast.Expr, ast.If),
)


CONDITIONS = ("TYPE_CHECKING", "__name__ == '__main__'", "sys.version_info < (3, 11)")


SCRIPTS = ["train.py", "train_multi_gpu.py", "eval.py"]


def imported(path):
    """Returns the modules that a file imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_older_interpreter_is_refused():
    """Before it imports what it cannot read; the programs themselves it can."""
    old = "import runpy, sys; sys.version_info = (3, 10, 12, 'final', 0)"
    done = runs.run_anew("-c", f"{old}; runpy.run_module('cifar10')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Python 3.11 is needed")
    for path in (*(ROOT / script for script in SCRIPTS), PACKAGE / "__init__.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 6))
    early = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not early, "the package's first file imports what may be newer"


def test_imported_packages_are_declared():
    """Not only by another package that happens to need them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    declared = {*project["dependencies"], *(name for names in extras for name in names)}
    declared = {re.match(r"[\w-]+", name)[0].replace("-", "_") for name in declared}
    declared |= {"PIL", *sys.stdlib_module_names, "cifar10"}
    for path in PACKAGE.rglob("*.py"):
        packages = {module.partition(".")[0] for module in imported(path)}
        assert packages <= declared, path


def test_nothing_happens_at_import():
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            assert isinstance(node, DEFINITIONS), (name, node.lineno)
            if isinstance(node, ast.Expr):  # Only the docstring.
                assert isinstance(node.value, ast.Constant), (name, node.lineno)
            if isinstance(node, ast.If):
                assert ast.unparse(node.test) in CONDITIONS, name
