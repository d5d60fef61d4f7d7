"""The examples in the docstrings of the Python interface."""

import doctest
import importlib
import inspect
import re

import numpy as np
import pytest

import cifar10
from runs import ROOT

# What docs/reference/python.md shows, by its full name.
REFERENCE = (ROOT / "docs/reference/python.md").read_text()
DOCUMENTED = re.findall(r"\.\. auto\w+:: (\S+)", REFERENCE)


def check_examples(folder, monkeypatch, *, of_trainings):
    """Runs each example as if its page had imported NumPy and the public names."""
    public = {name: getattr(cifar10, name) for name in cifar10.__all__}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    checked, said = [], []
    for name in DOCUMENTED:
        module, _, attribute = name.rpartition(".")
        documented = getattr(importlib.import_module(module), attribute)
        text = inspect.getdoc(documented)
        if ">>>" in text and ("train(" in text) == of_trainings:
            (folder / name).mkdir()
            monkeypatch.chdir(folder / name)
            names = {**public, "np": np, attribute: documented}
            example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
            assert runner.run(example, out=said.append).failed == 0, "".join(said)
            checked.append(name)
    assert len(checked) > 2


def test_each_public_name_has_an_example():
    for name in cifar10.__all__:
        assert ">>>" in inspect.getdoc(getattr(cifar10, name)), name


def test_docstring_examples_print_their_shown_output(tmp_path, monkeypatch):
    check_examples(tmp_path, monkeypatch, of_trainings=False)


@pytest.mark.slow
def test_training_examples_print_their_shown_output(tmp_path, monkeypatch):
    check_examples(tmp_path, monkeypatch, of_trainings=True)
