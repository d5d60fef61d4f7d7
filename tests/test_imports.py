"""Scripts hold flags and a call, and nothing happens at import."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cifar10"


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
            allowed = ["__name__ == '__main__'"] if name == "__main__" else []
            assert ast.unparse(node.test) in ["TYPE_CHECKING", *allowed]
