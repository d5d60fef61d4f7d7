"""Every layer of Keras trains and evaluates as in plain Keras, or is refused."""

import keras
import pytest

from conformance import layer_rows
from conformance.rows import check, params

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
    # Keras 3.16's nightly says so of LSTM, which takes a mask as before.
    pytest.mark.filterwarnings("ignore:Layer 'lstm.*does not support masking"),
]


@pytest.mark.parametrize("row", params(layer_rows.rows()))
def test_each_layer_equals_plain_keras_or_is_refused(row, four_cpus, record_property):
    check(row, four_cpus, record_property)


def test_the_table_has_every_layer_of_keras_once():
    """Names that Keras gives to the same layer count as one."""
    public = {
        name: one for name, one in vars(keras.layers).items() if type(one) is type
    }
    named = [row.name for row in layer_rows.rows()] + [*layer_rows.NOT_IN_MODELS]
    assert len({*named}) == len(named)
    assert {public[name] for name in named} == {*public.values()}
