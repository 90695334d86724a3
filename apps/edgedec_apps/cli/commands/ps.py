"""edgedec ps: the models that a running server has loaded."""

from datetime import UTC, datetime
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.options import AsJson
from edgedec_apps.cli.server_client import Address, ask
from edgedec_apps.cli.shown.terminal import one_line, write_json, write_line, write_paragraph, write_table

_LEGEND = (
    "memory: the most that the model may hold beside the server itself, with full contexts, grammars and "
    "stores of drafts; edgedec plan tells what edgedec run may hold, itself included"
)


def command(*, server: Address, as_json: AsJson = False) -> None:
    """List the models that a running server has loaded.

    With the most memory that each may hold beside the server itself, its context, the requests that use it, and how
    long it stays.
    """
    models = ask("GET", server, "/api/ps").get("models", [])
    if as_json:
        write_json({"models": models})
        return
    if not models:
        write_line("no model is loaded")
        return
    write_table([("NAME", "MEMORY", "CONTEXT", "REQUESTS", "UNTIL"), *map(_row, models)])
    write_line("")
    write_paragraph(_LEGEND)


def _row(model: dict[str, Any]) -> tuple[str, str, str, str, str]:
    state = model.get("edgedec", {})
    return (
        one_line(model.get("name", "")),
        format_bytes(int(model.get("size", 0))),
        str(model.get("context_length", "")),
        str(state.get("requests", "")),
        "its requests end" if state.get("leaving") else _until(str(model.get("expires_at", ""))),
    )


def _until(expires_at: str) -> str:
    """Return how long a model stays, in words.

    >>> _until("9999-12-31T23:59:59Z")
    'for ever'
    """
    try:
        expires = datetime.fromisoformat(expires_at.replace("Z", "+00:00"))
    except ValueError:
        return one_line(expires_at)
    if expires.year == 9999:
        return "for ever"
    seconds = max(0, round((expires - datetime.now(UTC)).total_seconds()))
    return f"in {seconds} s" if seconds < 120 else f"in {round(seconds / 60)} min"
