"""The faults of `make mutants` still fit the sources; trying them takes too long for every run."""

import ast
import re
from collections import Counter
from pathlib import Path

import try_mutants

MUTANTS = try_mutants.load_mutants()
TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "whence"


def test_each_fault_is_in_its_file_once_by_name():
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    gone = [m.name for m in MUTANTS if m.before not in (SOURCES / m.file).read_text(encoding="utf-8")]
    assert gone == []


def test_each_fault_leaves_python_that_can_be_read():
    broken = []
    for mutant in MUTANTS:
        file = SOURCES / mutant.file
        if file.suffix == ".py":
            try:
                ast.parse(file.read_text(encoding="utf-8").replace(mutant.before, mutant.after))
            except SyntaxError:
                broken.append(mutant.name)
    assert broken == []


def test_each_names_a_test_that_is_there():
    for mutant in MUTANTS:
        file, *names = mutant.test.partition(" ")[0].split("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"(def|class) {name.partition('[')[0]}\b", text), mutant.name
