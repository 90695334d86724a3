"""From --json-schema, --regex and --grammar to the grammar that a text keeps to."""

from typing import Any

from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_apps.cli.options import SamplingFlags
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.texts import read_text


def grammar_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return Engine.stream's option `grammar`, where one is asked for.

    Raises:
        RequestError: More than one is asked for, a file is not UTF-8, or a schema is no JSON object.
        StorageError: A file can't be read.
    """
    given = [name for name in ("json_schema", "regex", "grammar") if getattr(flags, name) is not None]
    if not given:
        return {}
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"{names} are given; a text keeps to one: leave out the others")
    if flags.ignore_end:
        raise RequestError("--ignore-end goes on past the end, which a grammar decides; leave it out")
    if flags.json_schema is not None:
        return {"grammar": Grammar.json_schema(read_text(flags.json_schema))}
    if flags.grammar is not None:
        return {"grammar": Grammar.lark(read_text(flags.grammar))}
    return {"grammar": Grammar.regex(argument_text(flags.regex, "--regex") or "")}
