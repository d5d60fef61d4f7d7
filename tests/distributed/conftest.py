"""Shared by the tests of several workers."""

import gc
import warnings

import pytest


@pytest.fixture
def connections_end():
    """Ends workers' connections, which last as their processes, with the test.

    Python 3.13 would blame another test for them.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
