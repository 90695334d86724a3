"""Count the statements of the product's code in its syntax trees, docstrings left out.

    python benchmarks/overhead/statements.py
    git worktree add /tmp/before REVISION && python benchmarks/overhead/statements.py /tmp/before .

Lines can be joined and comments removed; statements say how much code there is to read.
"""

import ast
import sys
from pathlib import Path

PACKAGES = (
    "edgedec",
    "runtimes/edgedec_runtimes",
    "apps/edgedec_apps",
    "export/edgedec_export",
    "models/edgedec_models",
    "methods/edgedec_methods",
)


def n_statements(folder: Path) -> int:
    """Return how many statements the Python files below a folder hold, docstrings left out."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for tree in trees for node in ast.walk(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """Print the statements of each package, for each of the checkouts given (this one where none is)."""
    for root in [Path(name) for name in sys.argv[1:]] or [Path(__file__).resolve().parents[2]]:
        found = {package: n_statements(root / package) for package in PACKAGES}
        print(f"{root}: {sum(found.values())}", *(f"{name} {n}" for name, n in found.items()), sep="\n  ")


if __name__ == "__main__":
    main()
