"""The page on own models says how many rows there are."""

from collections import Counter
from pathlib import Path

from conformance import layer_rows, style_rows, surrounding_rows
from conformance.rows import NEW_IN_3_16, outcome

PAGE = Path(__file__).parents[2] / "docs" / "own-model.md"
TABLES = {
    "layers": layer_rows,
    "styles of models": style_rows,
    "optimizers, losses and so on": surrounding_rows,
}


def test_the_page_has_the_numbers_of_the_tables():
    lines = {}
    for line in PAGE.read_text().splitlines():
        name, *numbers = [cell.strip() for cell in line.strip("|").split("|")]
        lines[name] = numbers
    for name, table in TABLES.items():
        counted = [
            one for one in table.rows() if one.name.split()[0] not in NEW_IN_3_16
        ]
        found = Counter(map(outcome, counted))
        kinds = ("equal", "refused for two", "refused", "xfail")
        assert lines[name] == [str(found[kind]) for kind in kinds], name
