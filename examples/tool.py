"""A model that calls a function of this program: python tool.py MODEL "What is the weather in Oslo?"

Take a model whose chat template knows tools, such as qwen2.5-coder-1.5b.
"""

import json
import sys
from typing import Any

import edgedec
from edgedec_apps.call_grammar import bound_calls
from edgedec_apps.replies import split_reply

WEATHER = {"Oslo": "4 degrees, rain", "Cairo": "31 degrees, sun"}
TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
MOST_ROUNDS = 4


def weather(city: str = "") -> str:
    """Return the weather in a city; a model may ask for anything."""
    return WEATHER.get(city, f"nothing is known of {city!r}; the cities are {', '.join(WEATHER)}")


def answer(model: edgedec.Engine, question: str) -> str:
    """Return the model's answer, after the calls that it wants to make."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    tools = [{"type": "function", "function": TOOL}]
    grammar = bound_calls(model, tools)  # a call, should the model make one, is valid
    for _ in range(MOST_ROUNDS):
        reply = model.chat(messages, tools=tools, grammar=grammar, max_tokens=200, temperature=0)
        parts = split_reply(reply.text, tools={"weather": TOOL["parameters"]})  # type: ignore[dict-item]
        if not parts.calls:
            return parts.text
        calls = [call.for_template() for call in parts.calls]
        messages.append({"role": "assistant", "content": parts.text, "tool_calls": calls})
        for call in parts.calls:
            arguments = json.loads(call.arguments)
            result = weather(**arguments) if arguments.keys() <= {"city"} else "it takes a city"
            print(f"{call.name}({call.arguments}) -> {result}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
    return "the model makes calls without end"


def main(name: str, question: str) -> None:
    """Print the answer to a question."""
    with edgedec.load(name) as model:
        print(answer(model, question))


if __name__ == "__main__":
    main(*sys.argv[1:])
