"""Running a small function that a model wrote, against tests: in a process of its own, with limits.

What may run is narrow: the syntax tree imports five harmless modules at most, and has no name or attribute that begins
with an underscore or could reach outside. This is a checker for made tasks, not a sandbox for any code.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence

from made_tasks import Call

from edgedec_apps import limits

_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_NO_NAMES = frozenset(
    re.findall(
        r"\w+",
        "open exec eval compile input breakpoint globals locals vars getattr setattr delattr exit quit help memoryview "
        "type object super dir classmethod staticmethod property sys os modules builtins format format_map mro "
        "gi_frame gi_code",
    )
)
_NO_NODES = (ast.Global, ast.Nonlocal, ast.ClassDef, ast.AsyncFunctionDef, ast.With)
_MODULES = frozenset({"collections", "functools", "itertools", "math", "typing"})
_SECONDS = 3
_BYTES = 512 << 20
_DRIVER = """
import json, runpy, sys
runpy.run_path({limits!r})["limit"](2, AS={bytes}, FSIZE=0)
code, calls = json.load(sys.stdin)
names = {{"print": lambda *values, **options: None}}
exec(code, names)
found = []
for numbers in calls:
    try:
        value = names["solve"](list(numbers))
        found.append(value if type(value) is int else repr(value)[:80])
    except Exception as error:
        found.append((type(error).__name__ + ": " + str(error))[:80])
print(json.dumps(found))
"""


def code_of(text: str) -> str | None:
    """Return the code of an answer: its last block of code, or all of it; None where that may not run.

    >>> code_of("Sure:\\n```python\\ndef solve(x):\\n    return 1\\n```")
    'def solve(x):\\n    return 1\\n'
    >>> code_of("import os; os.remove('x')") is None
    True
    """
    blocks = _BLOCK.findall(text)
    code = str(blocks[-1]) if blocks else text
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code if all(_may_run(node) for node in ast.walk(tree)) else None


def _may_run(node: ast.AST) -> bool:
    """Return whether a piece of syntax reaches nothing outside of the function."""
    if isinstance(node, _NO_NODES):
        return False
    if isinstance(node, ast.Import):
        return all(alias.name in _MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in _MODULES and all(_is_harmless(alias.name) for alias in node.names)
    if isinstance(node, ast.Name):
        return _is_harmless(node.id)
    return not isinstance(node, ast.Attribute) or _is_harmless(node.attr)


def _is_harmless(name: str) -> bool:
    return name not in _NO_NAMES and not name.startswith("_")


def n_passed(text: str, calls: Sequence[Call]) -> int:
    """Return how many calls the function of an answer gets right; 0 where it does not run, or takes too long."""
    found = returned(text, calls)
    return (
        0 if isinstance(found, str) else sum(value == call.expected for value, call in zip(found, calls, strict=True))
    )


def returned(text: str, calls: Sequence[Call]) -> list[int | str] | str:
    """Return what the function of an answer returns for each call; why it does not run, where it does not.

    A value that is no whole number is returned as text; an error is returned as its name and message.
    """
    code = code_of(text)
    if code is None:
        return "there is no block of Python code that may run here"
    given = json.dumps([code, [call.numbers for call in calls]])
    command = [sys.executable, "-I", "-S", "-c", _DRIVER.format(limits=limits.__file__, bytes=_BYTES)]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_SECONDS, env={})
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return f"the function takes longer than {_SECONDS} s"
    except ValueError:
        found = None
    if not isinstance(found, list) or len(found) != len(calls):
        return f"the code fails: {(done.stderr.strip().splitlines() or ['it has no function solve'])[-1]:.200}"
    return found


def wrong_calls(text: str, calls: Sequence[Call]) -> list[str]:
    """Return a sentence for each call that the function of an answer gets wrong.

    >>> wrong_calls("def solve(x):\n    return 1", [Call((1, 2), 3)])
    ['solve([1, 2]) returns 1; it must return 3']
    """
    found = returned(text, calls)
    if isinstance(found, str):
        return [found]
    return [
        f"solve({list(call.numbers)}) returns {value}; it must return {call.expected}"
        for value, call in zip(found, calls, strict=True)
        if value != call.expected
    ]
