"""Count the tokens that a step adds where a trained head drafts texts that keep to a grammar.

    python benchmarks/heads/head_grammars.py smollm2-135m

For each grammar, eight texts (four prompts at temperature 0 and 0.8), by the head alone (`head`) and beside the other
drafters (`auto`): tokens a step, the nodes that the head drafted, those that were right, and the CPU time. The exit
status is 1 where a text differs from plain decoding's.
"""

import argparse
import json
import sys
import time
from typing import Any

import edgedec
from edgedec.grammar import Grammar

_TEXT = {"type": "string", "maxLength": 40}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": _TEXT,
        "hobbies": {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4},
        "summary": {"type": "string", "maxLength": 160},
    },
    "required": ["name", "age", "city", "hobbies", "summary"],
    "additionalProperties": False,
}
GRAMMARS = {
    "JSON schema": Grammar.json_schema(_SCHEMA),
    "sentences": Grammar.regex(r"([A-Z][a-z]+( [a-z]+){3,12}\. ){4}"),
    "numbers": Grammar.regex(r"([0-9]{1,4}, ){20}[0-9]+"),
}
PROMPTS = (
    "Describe a fictional person as JSON.",
    "Invent a sailor from Norway, as a record.",
    "Give me the profile of a young chess player from India.",
    "Who is the baker in this story? Anna, 61, runs a bakery in Lyon.",
)


def run(model: str, draft: str, n_draft_max: int) -> dict[str, dict[str, Any]]:
    """Return for each grammar the texts' token ids, and what was counted."""
    found: dict[str, dict[str, Any]] = {}
    with edgedec.load(model, runtime="cpu", draft=draft, n_draft_max=n_draft_max, n_ctx=1024, offline=True) as engine:
        for name, grammar in GRAMMARS.items():
            texts, n_steps, counts, begun = [], 0, {"nodes": 0, "right": 0}, time.process_time()
            for temperature in (0.0, 0.8):
                for prompt in PROMPTS:
                    ids = engine.chat_ids([{"role": "user", "content": prompt}])
                    made = engine.generate(ids, grammar=grammar, temperature=temperature, seed=1, max_tokens=160)
                    texts.append(made.token_ids)
                    n_steps += made.stats.n_steps
                    of_head = made.stats.drafters.get("head", {})
                    counts = {key: n + int(of_head.get(key, 0)) for key, n in counts.items()}
            per_step = round(sum(map(len, texts)) / n_steps, 3)
            cpu_s = round(time.process_time() - begun, 2)
            found[name] = {"texts": texts, "tokens_per_step": per_step, **counts, "cpu_s": cpu_s}
    return found


def main() -> int:
    """Parse the command line, run, and print a line of JSON for each grammar and kind of drafting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model that has a head")
    parser.add_argument("--draft-max", type=int, default=4, help="most nodes of a draft (default: 4)")
    options = parser.parse_args()
    plain, is_same = run(options.model, "off", options.draft_max), True
    for draft in ("head", "auto"):
        for name, found in run(options.model, draft, options.draft_max).items():
            same = found.pop("texts") == plain[name]["texts"]
            is_same &= same
            print(json.dumps({"grammar": name, "draft": draft, "same_text": same} | found), flush=True)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
