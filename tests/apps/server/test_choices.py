"""guided_choice: the text is drawn as a whole by the exact probabilities, which stand in the answer."""

import json
from typing import Any

import pytest
from support.processes.running_server import Running, messages

from edgedec.grammar import Grammar
from edgedec_apps.choices import choose

pytestmark = pytest.mark.slow

TEXTS = ["abb", "bc", "c"]  # the most probable first token begins the least probable one


def test_texts_are_drawn_as_wholes(server: Running) -> None:
    """The best one at temperature 0, else by the seed; several texts, streams, and text prompts."""
    engine, chat = server.engine, messages("x")

    def post(address: str, **more: Any) -> Any:
        return server.client.post(f"/v1/{address}", json={"guided_choice": TEXTS, "temperature": 0} | more)

    weighed = choose(engine, chat, TEXTS)
    shares = {choice.text: choice.probability for choice in weighed.choices}
    assert engine.chat(chat, temperature=0, grammar=Grammar.regex("abb|bc|c")).text == "abb"
    for k, drawn in enumerate(post("chat/completions", messages=chat, temperature=5, seed=4, n=9).json()["choices"]):
        assert (drawn["message"]["content"], drawn["choice_probabilities"]) == (weighed.drawn(5, 4 + k).text, shares)
    stream = post("chat/completions", messages=chat, stream=True).text
    parts = [json.loads(line[len("data: ") :])["choices"][0] for line in stream.split("\n\n")[:-2]]
    assert "".join(part["delta"].get("content", "") for part in parts) == "c"
    assert parts[-1]["choice_probabilities"] == shares
    for prompt, choice in zip("xy", post("completions", prompt=["x", "y"]).json()["choices"], strict=True):
        expected = [(each.text, each.probability) for each in choose(engine, prompt, TEXTS).ranked]
        assert (choice["text"], [*choice["choice_probabilities"].items()]) == (expected[0][0], expected)


@pytest.mark.parametrize("texts", [[], [""], ["a", "a"], ["a"] * 1001])
def test_refusals_name_the_field(server: Running, texts: list[str]) -> None:
    """Each is a 400."""
    reply = server.client.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"choice": texts}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "structured_outputs.choice")
