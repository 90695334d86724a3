"""From --json-schema, --regex, --grammar and --json-close to the grammar that a text keeps to, and whether it did."""

from typing import Any

from edgedec.errors import CutTextError, RequestError
from edgedec.grammar import Grammar
from edgedec.sequence import Generation
from edgedec_apps.cli.options import SamplingFlags
from edgedec_apps.cli.prompt import argument_text
from edgedec_apps.texts import read_text


def grammar_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return Engine.stream's options `grammar` and `json_close`, where a grammar is asked for.

    Raises:
        RequestError: More than one is asked for, --json-close without one, a file is not UTF-8, or a schema is no JSON
            object.
        StorageError: A file can't be read.
    """
    given = [name for name in ("json_schema", "regex", "grammar") if getattr(flags, name) is not None]
    if not given:
        if flags.json_close:
            raise RequestError("--json-close needs --json-schema, --regex or --grammar: without one nothing is closed")
        return {}
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise RequestError(f"{names} are given; a text keeps to one: leave out the others")
    if flags.ignore_end:
        raise RequestError("--ignore-end goes on past the end, which a grammar decides; leave it out")
    return {"grammar": _grammar(flags), "json_close": flags.json_close}


def _grammar(flags: SamplingFlags) -> Grammar:
    if flags.json_schema is not None:
        return Grammar.json_schema(read_text(flags.json_schema))
    if flags.grammar is not None:
        return Grammar.lark(read_text(flags.grammar))
    return Grammar.regex(argument_text(flags.regex, "--regex") or "")


def cut_text(generation: Generation) -> CutTextError | None:
    """Return the error of a text that was cut before its grammar let it end, by max_tokens or a full context."""
    if generation.finish_reason != "length" or generation.is_whole is not False:
        return None
    n = len(generation.token_ids)
    return CutTextError(
        f"the text was cut after {n} tokens, before it was whole: it is only the beginning of what was asked for; "
        "give it more (--max-tokens, --context), or have it closed in time (--json-close)"
    )
