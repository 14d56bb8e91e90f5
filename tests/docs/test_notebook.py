"""The notebook runs from its first cell to its last, and what it shows is what its cells print."""

import json
from pathlib import Path

import pytest

pytest.importorskip("Box2D")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lunarlander.ipynb"
SMALL = {"RUN": "run", "ROUNDS": 2, "ROUND": 2, "STEPS": 256, "SEEDS": 1, "EPISODES": 2, "CONTINUATIONS": 2}


def read_cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_its_cells_run_on_small_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, *others = ("".join(cell["source"]) for cell in read_cells())
    names: dict = {}
    exec(first, names)
    assert {name for name in names if name.isupper()} == set(SMALL)
    names |= SMALL
    for source in others:
        exec(compile(source, NOTEBOOK.name, "exec"), names)
    assert "Every observation is the stored one." in capsys.readouterr().out
    assert len(names["proof"].table) == 1 * 2 * 4  # seeds, outcomes, variants
    assert names["group"]["record_id"].is_in(names["scored"]["record_id"]).all()


def test_every_cell_was_run_in_order_without_errors():
    cells = read_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert NOTEBOOK.stat().st_size < 1_000_000
