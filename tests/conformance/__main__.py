"""Trains every row of the tables and prints how many are equal, refused or neither.

python -m tests.conformance [options of pytest, such as -k Dropout]
"""

import sys
from collections import Counter
from pathlib import Path

import pytest


class Totals:
    """Counts the rows by their outcomes."""

    def __init__(self):
        self.found = Counter()

    def pytest_runtest_logreport(self, report):
        outcome = dict(report.user_properties).get("outcome")
        if report.when == "call" and outcome:  # Tests of the tables have none.
            self.found["different" if report.failed else outcome] += 1


totals = Totals()
everything = ["-q", "-m", "slow or not slow", str(Path(__file__).parent)]
code = pytest.main([*everything, *sys.argv[1:]], plugins=[totals])
print(*(f"{number} {outcome}" for outcome, number in totals.found.items()), sep=", ")
sys.exit(code)
