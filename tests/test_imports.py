"""Arrows point one way: scripts, `training` and `evaluation`, then everything else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cifar10"

# What a module may import of the package, besides `errors`. One that is not named here
# is a leaf: it takes plain arguments and imports nothing of its siblings.
MAY_IMPORT = {
    "__main__": {"cli", "commands"},
    "prediction.exported": {"distortions", "export", "following", "records"},
    "prediction.predicting": {"prediction", "devices", "follower", "records"},
    "prediction.service": {"prediction", "following", "records"},
    "prediction.serving": {"prediction", "devices", "follower", "run_directory"},
    "assembly": {
        "cluster",
        "config",
        "contradictions",
        "datasets",
        "device_input",
        "devices",
        "distortions",
        "distributed",
        "input",
        "model",
        "optimizers",
        "schedule",
        "sections",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "bottleneck": {"timing", "towers"},
    "checkpoints": {"files", "readers"},
    # A command reads flags, and imports what it is for when it runs.
    "commands.doctor": {"config", "doctor"},
    "commands.export": {"cli", "config", "export"},
    "commands.plan": {"cli", "config", "flags", "sections"},
    "commands.predict": {"prediction", "cli", "config"},
    "commands.report": {"cli", "report"},
    "commands.serve": {"prediction", "cli", "config"},
    "config": {"contradictions", "options"},
    "config_file": {"config"},
    "datasets": {"download", "records", "synthetic"},
    "device_input": {"input"},
    # It says why a GPU is missing where one was asked for.
    "devices": {"doctor"},
    "distributed": {
        "averaging",
        "results",
        "signals",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    # Its modules know one another, and little of the rest.
    "doctor.advice": {"doctor"},
    "doctor.facts": {"doctor"},
    "doctor.gpu_advice": {"doctor"},
    "doctor.libraries": {"doctor"},
    "doctor.nvidia": {"doctor"},
    "doctor.ports": {"cluster"},
    "doctor.probe": {"doctor"},
    "doctor.report": {"doctor"},
    "download": {"transfer"},
    "evaluation": "anything but training",
    "evaluation_summaries": {"scores", "summaries"},
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
    "flags": {"config", "config_file"},
    "follower": {"checkpoints", "following", "run_directory", "train_state"},
    "following.attached": {"following", "records", "train_state"},
    "following.live_copy": {"distortions", "scoring"},
    "following.run": {
        "checkpoints",
        "files",
        "following",
        "readers",
        "records",
        "run_directory",
        "trained_model",
    },
    "input": {"distortions"},
    "launcher": {"cluster", "signals"},
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
    "model": {"layers", "models", "own_models", "precision"},
    "models.airbench": {"layers"},
    "models.resnet": {"layers"},
    "models.tutorial": {"layers"},
    "not_finite": {"config", "progress", "results", "towers"},
    "own_models": {"layers"},
    "progress": {"checkpoints", "retention", "towers", "train_state"},
    "rendezvous": {"cluster", "roll_call"},
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
    "retention": {"checkpoints", "files", "readers", "scores"},
    "roll_call": {"cluster"},
    "scores": {"files"},
    "scoring": {"metrics", "model"},
    "sections.builder": {
        "averaging",
        "results",
        "sections",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "sections.cutting": {"model", "sections"},
    "sections.cycle": {"averaging", "sections"},
    "sections.estimate": {"sections", "towers", "train_state"},
    "sections.functions": {"averaging", "sections", "train_state"},
    "sections.plan": {"sections"},
    "sections.planner": {
        "layers",
        "model",
        "sections",
        "tower",
        "towers",
        "train_state",
        "update",
    },
    "sections.report": {
        "assembly",
        "config",
        "devices",
        "precision",
        "records",
        "sections",
        "settings",
    },
    "sections.tower": {"averaging", "sections", "tower", "train_state"},
    "settings": {"config", "datasets", "devices"},
    "strategy": {"cluster", "devices", "rendezvous"},
    "tower": {"averaging", "train_state"},
    "towers": {"averaging", "results", "tower", "train_state", "update"},
    "trained_model": {
        "checkpoints",
        "config_file",
        "datasets",
        "distortions",
        "model",
        "precision",
        "records",
        "run_directory",
    },
    "training": "anything but evaluation",
    "update": {"averaging", "train_state"},
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
