"""The package uses few private names of others, and they exist.

Each has no public counterpart in Python, or in TensorFlow 2.21 and 2.22. `tf.raw_ops`
is public.
"""

import argparse
import ast
from pathlib import Path

import keras
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver
from tensorflow.python.eager import context
from tensorflow.python.framework import config

PACKAGE = Path(__file__).parents[2] / "cifar10"
TREES = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
# Private by their names, documented by Python.
OF_PYTHON = {"_asdict", "_replace", "_exit", "_current_frames"}

MODULES = {
    # Several machines: after how long a silent one counts as lost, and what they tell
    # one another.
    "tensorflow.compiler.xla.tsl.protobuf",
    "tensorflow.python.eager",
    # Whether operations are deterministic: only its setter is public.
    "tensorflow.python.framework.config",
    # The lists of nodes that SLURM writes in short.
    "tensorflow.python.distribute.cluster_resolver",
}


def test_the_used_private_names_are_listed_and_exist():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    existing = {
        # The order in which Keras computes layers, and so advances random states.
        "_nodes_by_depth": model._functional._nodes_by_depth,
        # What a built model holds, which takes no new attributes.
        "_seed_generators": model._seed_generators,
        # The layers within a layer that is no model.
        "_flatten_layers": model.layers[0]._flatten_layers,
        # The flags of a parser, also those that its help does not list.
        "_option_string_actions": argparse.ArgumentParser()._option_string_actions,
    }
    assert private_attributes() == set(existing)
    assert callable(existing["_flatten_layers"])
    assert {*existing["_nodes_by_depth"]} == {0, 1}
    assert {*existing["_option_string_actions"]} == {"-h", "--help"}


def test_the_private_modules_exist_with_the_used_names():
    imported = {
        node.module
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    private = ("keras.src", "tensorflow.")
    assert {name for name in imported if name.startswith(private)} == MODULES
    assert coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=2)
    assert config.is_op_determinism_enabled()
    assert callable(context.Context.configure_coordination_service)
    assert callable(context.Context.set_config_key_value)
    assert callable(context.Context.get_config_key_value)
    assert slurm_cluster_resolver.expand_hostlist("a[9-10],b") == ["a9", "a10", "b"]
    assert slurm_cluster_resolver.expand_tasks_per_node("2(x2),1") == [2, 2, 1]


def private_attributes():
    """Returns the attributes with a private name that the package does not define."""
    defined, read = set(), set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    return {
        name
        for name in read - defined - OF_PYTHON
        if name.startswith("_") and not name.startswith("__")
    }
