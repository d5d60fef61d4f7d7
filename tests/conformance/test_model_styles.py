"""Every style of model trains and evaluates as in plain Keras, or is refused."""

import pytest

from conformance import style_rows
from conformance.rows import check, params

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("row", params(style_rows.rows()))
def test_each_model_style_equals_plain_keras_or_is_refused(
    row, four_cpus, record_property
):
    check(row, four_cpus, record_property)
