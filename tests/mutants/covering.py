"""Which fast tests run which lines of the package: one run of them all, kept in build/.

    python tests/mutants/covering.py    runs the fast tests anew: several minutes

What a test prepares (fixtures) may be asserted by any test of its file, so these lines
belong to all of them. Lines that only other processes run, or TensorFlow's own threads,
belong to none.
"""

import collections
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "mutants" / "covering.json"


class Contexts:
    """A plugin of pytest: tells `coverage` which test runs, and takes its seconds."""

    def __init__(self, coverage):
        self.switch = coverage.switch_context
        self.seconds = collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.switch(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self.switch(item.nodeid.partition("[")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self):
        self.switch("")

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("[")[0]
        # What fails without a fault would notice any.
        self.seconds[name] += math.inf if report.failed else report.duration


def record():
    """Keeps how long each fast test takes, and the tests of each line of each file."""
    import coverage

    KEPT.parent.mkdir(parents=True, exist_ok=True)
    where = {"data_file": str(KEPT.with_suffix(".db")), "config_file": False}
    measured = coverage.Coverage(**where, source=[str(ROOT / "cifar10")])
    measured.erase()
    plugin = Contexts(measured)
    sys.path.insert(0, str(ROOT))  # As `python -m pytest` does.
    measured.start()
    code = pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[plugin])
    measured.stop()
    if code > 1:
        sys.exit(f"The tests ended with {code}: nothing is kept.")
    of = collections.defaultdict(list)  # A context's tests.
    plugin.seconds = {n: s for n, s in plugin.seconds.items() if s < math.inf}
    for name in plugin.seconds:
        of[name] = [name]
        of[name.partition("::")[0]].append(name)
    data = measured.get_data()
    lines = {
        str(Path(path).relative_to(ROOT / "cifar10")): {
            line: sorted({test for name in names for test in of.get(name, ())})
            for line, names in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }
    KEPT.write_text(json.dumps({"seconds": plugin.seconds, "lines": lines}))


if __name__ == "__main__":
    record()
