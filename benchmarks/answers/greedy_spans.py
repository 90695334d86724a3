"""Ask whether greedy decoding is worse than the exact search for the span of a message that answers a question.

    python benchmarks/answers/greedy_spans.py smollm2-135m qwen2.5-coder-0.5b --tasks 20

The question of arXiv:2108.05857. Messages are those of made_json.py; an answer is right where it is the fact's words,
but for quotes and a full stop around them. Prints a line for each model, and ends with one line of JSON.
"""

import argparse
import json
from pathlib import Path

from made_json import json_tasks
from made_pairs import compared

import edgedec
from edgedec_apps.bench.provenance import report
from edgedec_apps.extraction import extract, question_text

QUESTIONS = {
    "customer": "Who has ordered something new?",
    "item": "What has been ordered?",
    "city": "To which city does the new order go?",
    "total": "How many euros does the new order cost in all?",
}


def answered(engine: edgedec.Engine, n: int) -> dict[str, dict[str, bool]]:
    """Return by way and question whether the answer is right, and whether greedy decoding quotes."""
    found: dict[str, dict[str, bool]] = {"greedy": {}, "exact": {}, "greedy quotes": {}}
    for task in json_tasks("extraction", n):
        message, facts = task.prompt.partition("Message: ")[2], json.loads(task.answer)
        for key, question in QUESTIONS.items():
            said = engine.chat(question_text(question, message), temperature=0.0, max_tokens=32).text
            span = extract(engine, question, message, n=1, max_tokens=16).spans[0].text
            name = f"{task.id} {key}"
            for way, text in (("greedy", said), ("exact", span)):
                found[way][name] = text.strip(" .\"'\n") == str(facts[key])
            found["greedy quotes"][name] = said.strip(" .\"'\n") in message
    return found


def main() -> None:
    """Ask each model, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    results = {}
    for name in options.models:
        with edgedec.load(name, offline=True, n_ctx=512) as engine:
            found = answered(engine, options.tasks)
        quotes = sum(found["greedy quotes"].values())
        results[name] = compared(found["exact"], found["greedy"]) | {"greedy quotes": quotes}
        print(f"{name}, the exact span beside greedy decoding: {results[name]}", flush=True)
    report({"benchmark": "greedy_spans", "results": results}, options.json_out)


if __name__ == "__main__":
    main()
