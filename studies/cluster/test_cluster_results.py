"""What the page says of forty runs on two nodes, against their summary."""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "results" / "cluster"


def test_what_is_said_of_forty_runs_is_what_they_gave():
    """Compare counts, the killed run and its rounds."""
    summary = json.loads((FOLDER / "summary.json").read_text(encoding="utf-8"))
    text = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert summary["equal"] == summary["results"] == summary["runs"] == 40
    assert summary["failures"] == {}
    ((name, start),) = summary["started_again"].items()
    assert f"{summary['equal']} of {summary['runs']} results" in text
    assert f"after {summary['killed_after']} runs" in text
    assert f"`{name}`, in round {start['rounds_done'] + 1} of {summary['settings']['rounds']}" in text
    assert f"on after round {start['went_on_after']}" in text
