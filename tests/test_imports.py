"""Arrows point one way: scripts, `training` and `evaluation`, then everything else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cifar10"

# What a module may import of the package, besides `errors`. One that is not named here
# is a leaf: it takes plain arguments and imports nothing of its siblings.
MAY_IMPORT = {
    "assembly": {
        "cluster",
        "config",
        "datasets",
        "device_input",
        "devices",
        "distortions",
        "distributed",
        "input",
        "model",
        "optimizers",
        "planner",
        "schedule",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "bottleneck": {"timing", "towers"},
    "config_file": {"config"},
    "device_input": {"input"},
    "distributed": {
        "averaging",
        "results",
        "signals",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "strategy": {"cluster", "devices", "rendezvous"},
    # It says why a GPU is missing where one was asked for.
    "devices": {"doctor"},
    # Its modules know one another, and little of the rest.
    "doctor.advice": {"doctor"},
    "doctor.facts": {"doctor"},
    "doctor.gpu_advice": {"doctor"},
    "doctor.libraries": {"doctor"},
    "doctor.nvidia": {"doctor"},
    "doctor.ports": {"cluster"},
    "doctor.probe": {"doctor"},
    "doctor.report": {"doctor"},
    "__main__": {"cli", "commands"},
    # A command reads flags, and imports what it is for when it runs.
    "commands.doctor": {"config", "doctor"},
    "commands.plan": {"cli", "config", "flags", "memory_report"},
    "memory_report": {
        "assembly",
        "config",
        "devices",
        "planner",
        "precision",
        "records",
        "settings",
    },
    "commands.export": {"cli", "config", "export"},
    "commands.report": {"cli", "report"},
    # A process of its own says why it died in the doctor's words.
    "export.exporter": {
        "datasets",
        "devices",
        "doctor",
        "export",
        "files",
        "input",
        "model",
        "restoring",
        "run_directory",
        "trained_model",
    },
    "export.formats": {"model"},
    "report.configuration": {"report"},
    "report.page": {"metrics", "report"},
    "report.reporter": {"devices", "report", "run_directory"},
    "report.run": {"checkpoints", "config_file", "run_directory", "scores"},
    "report.scored": {
        "datasets",
        "input",
        "metrics",
        "report",
        "restoring",
        "scoring",
        "trained_model",
    },
    "restoring": {"checkpoints", "readers", "run_directory", "trained_model"},
    "commands.predict": {"cli", "config", "predicting"},
    "commands.serve": {"cli", "config", "serving"},
    "attached_copy": {"live_copy", "records", "train_state"},
    "checkpoints": {"files", "readers"},
    "evaluation_summaries": {"scores", "summaries"},
    "flags": {"config", "config_file"},
    "exported": {"distortions", "live_copy", "records"},
    "followed_run": {
        "checkpoints",
        "files",
        "live_copy",
        "readers",
        "records",
        "run_directory",
        "trained_model",
    },
    "follower": {
        "attached_copy",
        "checkpoints",
        "followed_run",
        "live_copy",
        "run_directory",
        "train_state",
    },
    "launcher": {"cluster", "signals"},
    "live_copy": {"distortions", "scoring"},
    "loop": {
        "bottleneck",
        "config",
        "console",
        "contradictions",
        "not_finite",
        "profiling",
        "progress",
        "results",
        "run_directory",
        "signals",
        "summaries",
        "timing",
        "towers",
    },
    "models.airbench": {"layers"},
    "models.resnet": {"layers"},
    "own_models": {"layers"},
    "planner": {
        "layers",
        "memory",
        "section_functions",
        "section_plan",
        "section_tower",
        "sectioned",
        "sections",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "section_cycle": {"averaging", "section_functions", "section_tower", "sections"},
    "section_functions": {"averaging", "section_tower", "sections", "train_state"},
    "section_plan": {"memory", "section_tower", "sections", "towers", "train_state"},
    "section_tower": {"averaging", "sections", "tower", "train_state"},
    "sections": {"purity"},
    "sectioned": {
        "averaging",
        "results",
        "section_cycle",
        "section_functions",
        "section_tower",
        "sections",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "not_finite": {"config", "progress", "results", "towers"},
    "predicting": {"devices", "follower", "likeliest", "pictures", "records"},
    "progress": {"checkpoints", "retention", "towers", "train_state"},
    "retention": {"checkpoints", "files", "readers", "scores"},
    "scores": {"files"},
    "tower": {"averaging", "train_state"},
    "towers": {"averaging", "results", "tower", "train_state", "update"},
    "update": {"averaging", "train_state"},
    "config": {"contradictions", "options"},
    "rendezvous": {"cluster", "roll_call"},
    "roll_call": {"cluster"},
    "datasets": {"download", "records", "synthetic"},
    "download": {"transfer"},
    "input": {"distortions"},
    "model": {"layers", "models", "own_models", "precision"},
    "models.tutorial": {"layers"},
    "scoring": {"metrics", "model"},
    "service": {"likeliest", "live_copy", "pictures", "records", "service_metrics"},
    "serving": {
        "devices",
        "exported",
        "follower",
        "impatient_http",
        "run_directory",
        "service",
    },
    "settings": {"config", "datasets", "devices"},
    "trained_model": {
        "checkpoints",
        "config_file",
        "datasets",
        "distortions",
        "model",
        "records",
        "run_directory",
    },
    "evaluation": "anything but training",
    "training": "anything but evaluation",
}


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


@pytest.mark.parametrize("name", modules())
def test_arrows_point_one_way(name):
    allowed = MAY_IMPORT.get(name, set())
    siblings = imported_siblings(modules()[name])
    if isinstance(allowed, str):
        assert allowed.removeprefix("anything but ") not in siblings
        assert "cli" not in siblings
    else:
        assert siblings <= allowed


def test_every_rule_is_for_a_module_that_exists():
    assert set(MAY_IMPORT) <= set(modules())


@pytest.mark.parametrize("script", ["train.py", "train_multi_gpu.py", "eval.py"])
def test_scripts_hold_flags_and_a_call(script):
    assert imported_siblings(ROOT / script) <= {
        "cli",
        "cluster",
        "config",
        "flags",
        "launcher",
        "signals",
        "training",
        "evaluation",
    }
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
            | ast.ClassDef
            | ast.Expr
            | ast.If,
        )
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), "only the docstring"
        if isinstance(node, ast.If):
            allowed = ["__name__ == '__main__'"] if name == "__main__" else []
            assert ast.unparse(node.test) in ["TYPE_CHECKING", *allowed]


def test_no_file_is_long_without_a_reason():
    long = {
        name: length
        for name, path in modules().items()
        if (length := len(path.read_text().splitlines())) > 300
    }
    assert not long
