"""Optimizers, schedules, losses and metrics compute what they do in plain Keras."""

import pytest

from conformance import surrounding_rows
from conformance.rows import check, params

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("row", params(surrounding_rows.rows()))
def test_optimizers_losses_and_metrics_equal_plain_keras_or_are_refused(
    row, four_cpus, record_property
):
    check(row, four_cpus, record_property)


@pytest.mark.parametrize(
    ("module", "tables"),
    [(module, tables) for module, *tables in surrounding_rows.COMPLETE],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_tables_have_every_name_of_a_module_once(module, tables):
    """Names that Keras gives to the same class count as one."""
    public = {name: one for name, one in vars(module).items() if isinstance(one, type)}
    named = [name for table in tables for name in table]
    assert len({*named}) == len(named)
    assert {public[name] for name in named} == {*public.values()}
