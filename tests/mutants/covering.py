"""Which fast tests run which lines of the package: one run of them all, kept in build/.

    python tests/mutants/covering.py    runs the fast tests anew: several minutes
    python tests/mutants/covering.py tests/tools/test_plan.py    only those of files

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


def record(files=()):
    """Keeps how long each fast test takes, and the tests of each line of each file.

    With some files of tests, what was kept of the others stays.
    """
    import coverage

    kept = {"seconds": {}, "lines": {}}
    if files and KEPT.exists():
        kept = json.loads(KEPT.read_text())
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    where = {"data_file": str(KEPT.with_suffix(".db")), "config_file": False}
    measured = coverage.Coverage(**where, source=[str(ROOT / "cifar10")])
    measured.erase()
    plugin = Contexts(measured)
    sys.path.insert(0, str(ROOT))  # As `python -m pytest` does.
    measured.start()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[plugin])
    measured.stop()
    if code > 1:
        sys.exit(f"The tests ended with {code}: nothing is kept.")
    of = collections.defaultdict(list)  # A context's tests.
    plugin.seconds = {n: s for n, s in plugin.seconds.items() if s < math.inf}
    for name in plugin.seconds:
        of[name] = [name]
        of[name.partition("::")[0]].append(name)
    others = {n: s for n, s in kept["seconds"].items() if not _is_of(n, files)}
    lines = collections.defaultdict(lambda: collections.defaultdict(set))
    for path, of_lines in kept["lines"].items():
        for line, names in of_lines.items():
            lines[path][line] = {*names} & others.keys()
    data = measured.get_data()
    for path in data.measured_files():
        of_lines = lines[str(Path(path).relative_to(ROOT / "cifar10"))]
        for line, names in data.contexts_by_lineno(path).items():
            of_lines[str(line)] |= {test for name in names for test in of.get(name, ())}
    content = {"seconds": others | plugin.seconds, "lines": lines}
    KEPT.write_text(json.dumps(content, default=sorted))


def _is_of(name, files):
    return name.partition("::")[0] in files


if __name__ == "__main__":
    record(sys.argv[1:])
