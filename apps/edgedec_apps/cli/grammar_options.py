"""--json-schema, --regex, --grammar and --json-close, as options of a generation."""

from typing import Any

from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_apps.cli.options import SamplingFlags
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.texts import read_text


def grammar_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return the options `grammar` and `json_close` of Engine.stream; an empty dict where the flags name no grammar.

    Raises:
        RequestError: The flags name several grammars, or --json-close without one; a file is not UTF-8; a schema is
            not a JSON object.
        StorageError: A file can't be read.
    """
    given = [name for name in ("json_schema", "regex", "grammar") if getattr(flags, name) is not None]
    if not given:
        if flags.json_close:
            raise RequestError("--json-close needs a grammar; give --json-schema, --regex or --grammar too")
        return {}
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"{names} are given, and a text follows one grammar; give one of them")
    if flags.ignore_end:
        raise RequestError("--ignore-end continues past the end, which a grammar decides; leave --ignore-end out")
    return {"grammar": _grammar(flags), "json_close": flags.json_close}


def _grammar(flags: SamplingFlags) -> Grammar:
    if flags.json_schema is not None:
        return Grammar.json_schema(read_text(flags.json_schema))
    if flags.grammar is not None:
        is_gbnf = flags.grammar.suffix.lower() == ".gbnf"
        return (Grammar.gbnf if is_gbnf else Grammar.lark)(read_text(flags.grammar))
    return Grammar.regex(argument_text(flags.regex, "--regex") or "")
