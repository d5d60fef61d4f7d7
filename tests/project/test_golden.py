"""Fixed trainings compute what they did when `make golden-write` last wrote it."""

import pytest

from golden import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", run.read())
def test_a_run_computes_its_recorded_numbers(name):
    assert not run.difference(name, run.computed(name))
