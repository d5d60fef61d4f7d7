"""The faults of `make mutants`: all can still be put in, for tests that exist."""

from mutants import run

MUTANTS = [mutant for of_one_part in run.read().values() for mutant in of_one_part]


def test_there_are_many_mutants_and_all_differ():
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60
    assert not [str(mutant) for mutant in MUTANTS if mutant.fault == mutant.text]


def test_the_text_of_each_mutant_occurs_once():
    """Where a change has altered it, the line in mutants.toml has to follow."""
    assert not [f"{mutant}: {why}" for mutant in MUTANTS if (why := mutant.obstacle())]


def test_the_tests_named_by_mutants_exist():
    missing = []
    for name in {name for mutant in MUTANTS for name in mutant.names}:
        file, _, function = name.partition("[")[0].partition("::")
        if f"\ndef {function}(" not in (run.ROOT / file).read_text():
            missing.append(name)
    assert not missing
