"""Ask pip-audit for known vulnerabilities of the pinned versions: `make audit`.

Ends with an error where one is known. Where the question cannot be asked (pip-audit is not installed, there is no
network, the index knows no vulnerabilities) it says "not run", with the reason, and ends without an error.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"

MOST_SECONDS = 20
"""How long pip-audit may take."""

OPTIONS = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "5", "--format", "json")


def run_audit() -> subprocess.CompletedProcess[str]:
    """Run pip-audit on the pins."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), *OPTIONS]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)


def judge(packages: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Return the exit code and what to print for pip-audit's list of packages."""
    asked = [package for package in packages if "skip_reason" not in package]
    if not asked:
        reason = packages[0]["skip_reason"] if packages else "there are no pins"
        return 0, [f"pip-audit: not run: none of {len(packages)} packages could be looked up ({reason})."]
    holes = [(f"{package['name']} {package['version']}", hole) for package in asked for hole in package["vulns"]]
    lines = [f"{name}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'none'}" for name, hole in holes]
    skipped = len(packages) - len(asked)
    tail = f"; {skipped} could not be looked up" if skipped else ""
    return int(bool(lines)), [*lines, f"pip-audit: {len(lines)} known vulnerabilities in {len(asked)} packages{tail}."]


def main() -> int:
    """Run pip-audit, print what it says, and return the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("pip-audit: not run: it is not installed; pip install '.[dev]'.")
        return 0
    try:
        audit = run_audit()
        packages = json.loads(audit.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        print(f"pip-audit: not run: no answer within {MOST_SECONDS} s.")
        return 0
    except (json.JSONDecodeError, KeyError):
        print(f"pip-audit: not run: {(audit.stderr.strip().splitlines() or ['it printed nothing'])[-1]}")
        return 0
    code, lines = judge(packages)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
