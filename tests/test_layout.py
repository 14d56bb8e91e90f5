"""Tests are found as their sources are, and share helpers rather than each other."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_imports_another() -> None:
    imports = {
        path.name: node.module
        for folder in (TESTS, TESTS.parent / "studies")
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith(("test_", "conftest"))
    }
    assert imports == {}


def test_folders_are_those_of_the_sources() -> None:
    sources = {path.name for path in (TESTS.parent / "src" / "whence").iterdir() if path.is_dir()}
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders - sources == {"docs", "hosts"}


def test_a_folder_has_at_most_fourteen_files() -> None:
    counts = Counter(path.parent for path in (TESTS.parent / "src").rglob("*.py"))
    assert {folder: count for folder, count in counts.items() if count > 14} == {}
