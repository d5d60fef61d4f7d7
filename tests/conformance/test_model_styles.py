"""Every style of model trains and evaluates as in plain Keras, or is refused."""

import pytest

from conformance import style_rows
from conformance.rows import check, params

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("row", params(style_rows.rows()))
def test_a_style_is_equal_or_refused(row, four_cpus, record_property):
    check(row, four_cpus, record_property)
