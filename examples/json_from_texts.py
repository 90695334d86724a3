"""A line of JSON for each line of text: python json_from_texts.py MODEL < reviews.txt > reviews.jsonl

Four texts are read at a time and share each forward. What a text says never changes another one's answer.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import edgedec

SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 30},
        "rating": {"type": "integer", "minimum": 1, "maximum": 5},
        "wants_refund": {"type": "boolean"},
    },
    "required": ["product", "rating", "wants_refund"],
    "additionalProperties": False,
}


def records(model: edgedec.Engine, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield what the model makes of each text, in their order."""

    def record(text: str) -> dict[str, Any]:
        question = f"Which product is it, how is it rated from 1 to 5, is a refund wanted?\n\nReview: {text.strip()}"
        answer = model.chat(question, json_schema=SCHEMA, json_close=True, max_tokens=100, temperature=0)
        values: dict[str, Any] = json.loads(answer.text)
        return values

    with ThreadPoolExecutor(4) as threads:
        yield from threads.map(record, texts)


def main(name: str) -> None:
    """Read texts from the standard input, and print an object for each."""
    with edgedec.load(name, n_parallel=4, n_ctx=1024, grammars=True) as model:
        for record in records(model, sys.stdin):
            print(json.dumps(record, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
