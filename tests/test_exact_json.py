"""Numbers of JSON keep their digits from one text to the next."""

import json
from decimal import Decimal
from typing import Any

import pytest

from edgedec.exact_json import ExactFloat, decimal_of, dumps, exact_float
from edgedec.grammar import Grammar
from edgedec_apps.call_bodies import ToolCall
from edgedec_apps.server.anthropic.api import _shown
from edgedec_apps.server.core.answer import json_line, sse
from edgedec_apps.server.core.bodies import parse_object
from edgedec_apps.server.core.parts import Block
from edgedec_runtimes.chat.template import ChatTemplate

EXACT = ["0.12345678901234567890", "1e400", "-1e-400", "123456789012345678.5", "1E99999999999999999999999999"]
PLAIN = ["0.5", "1e5", "-0.0", "0.1", "123456789.12345679", "1.50", "5e-324"]


@pytest.mark.parametrize("text", EXACT + PLAIN)
def test_a_number_keeps_its_digits(text: str) -> None:
    """It acts as a float; only a text that no float has is remembered."""
    number = exact_float(text)
    assert isinstance(number, ExactFloat) == (text in EXACT)
    assert number == float(text)
    if text != EXACT[-1]:
        assert decimal_of(number) == Decimal(text)
    value = {"a": [number, {"b": (number,)}], "<": "x"}
    assert dumps(value) == json.dumps(value if text in PLAIN else value | {"a": ["?", {"b": ["?"]}]}).replace(
        '"?"', text
    )


DIGITS = '{"x": [0.12345678901234567890, 1e400], "n": 12345678901234567890}'


def test_digits_pass_through_requests_and_answers() -> None:
    """A body's schema, a call's arguments as an object in an answer, and a template's tojson."""
    value = parse_object(DIGITS.encode())
    assert Grammar.json_schema({"const": value}).source == f'{{"const": {DIGITS}}}'
    assert json_line(value) == DIGITS.encode() + b"\n"
    assert sse(value) == f"data: {DIGITS}\n\n".encode()
    call = ToolCall("f", DIGITS)
    assert DIGITS in dumps(_shown(Block(kind="call", index=0, text=DIGITS, call=call)))
    assert DIGITS in dumps(call.for_template())
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", bos_token="", eos_token="")
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call.for_template()]}]
    assert template.render(messages) == DIGITS
