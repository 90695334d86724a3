"""Run the tests of the lane `long`, which `pytest` leaves out, and write what came of them.

    python benchmarks/long_tests.py --json-out FILE

They repeat with every architecture, and with more seeds, what the other tests find with a few. By test function the
report has the tests that passed, failed or were skipped, and their seconds. The exit status is pytest's.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgedec_apps.bench.provenance import report

ROOT = Path(__file__).resolve().parents[1]


def outcome(case: ElementTree.Element) -> str:
    """Return "failed", "skipped" or "passed" for a test of a JUnit report."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def functions(path: Path) -> dict[str, dict[str, Any]]:
    """Return by test function the counts of outcomes, the seconds and the names of tests that failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    failed: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        whole = case.get("name", "")
        name = f"{case.get('classname')}.{whole.partition('[')[0]}"
        counts[name][outcome(case)] += 1
        seconds[name] += float(case.get("time", 0))
        if outcome(case) == "failed":
            failed[name].append(whole)
    return {
        name: {**counts[name], "seconds": round(seconds[name], 1), **({"names": failed[name]} if failed[name] else {})}
        for name in sorted(counts)
    }


def main() -> int:
    """Run the lane and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="test files or folders; all by default")
    parser.add_argument("--processes", type=int, default=2, help="test files that run at the same time")
    parser.add_argument("--json-out", type=Path, help="where to write the report")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        lane = ["-m", "long", f"--junitxml={junit}", "-n", str(given.processes), "--dist", "loadfile"]
        status = int(pytest.main(["--rootdir", str(ROOT), *lane, *(given.paths or [str(ROOT / "tests")])]))
        found = functions(junit)
    total: Counter[str] = Counter()
    for each in found.values():
        total.update({kind: each.get(kind, 0) for kind in ("passed", "failed", "skipped")})
    result = {"benchmark": "long_tests", **total, "seconds": round(time.monotonic() - began), "tests": found}
    report(result, given.json_out)
    return status


if __name__ == "__main__":
    sys.exit(main())
