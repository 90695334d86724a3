"""Count how often a predicate is asked about a token, where a mask would ask about the whole vocabulary (AWRS).

    python benchmarks/answers/predicate_tests.py smollm2-135m --texts 8

Texts are drawn at temperature 1 under constraints that a function says. Prints a line for each of them, and ends with
one line of JSON: calls a token on the average, in the dearest twentieth of the texts' tokens, and at the most.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

import edgedec
from edgedec.grammar import Predicate
from edgedec_apps.bench.provenance import report

PROMPT = "Describe the sea in one sentence."
PREDICATES: dict[str, Callable[[list[str]], bool]] = {
    "no letter e": lambda words: "e" not in "".join(words).lower(),
    "words of at most five letters": lambda words: all(len(word.strip(".,;:!?'\"")) <= 5 for word in words),
    "no word twice": lambda words: len({*words[:-1]}) == len(words[:-1]),
}


def counted(check: Callable[[list[str]], bool], calls: list[int]) -> Predicate:
    """Return a predicate that counts its calls in the last of the numbers."""

    def predicate(text: str, is_end: bool) -> bool:
        calls[-1] += 1
        return check(text.split())

    return predicate


def main() -> None:
    """Draw the texts, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    results = {}
    with edgedec.load(options.model, offline=True, draft="off", n_ctx=256) as engine:
        for name, check in PREDICATES.items():
            by_token = list[int]()
            for seed in range(options.texts):
                calls = [0]
                asked = counted(check, calls)
                for _ in engine.chat_stream(PROMPT, predicate=asked, temperature=1.0, seed=seed, max_tokens=40):
                    calls.append(0)
                by_token += calls[:-1]
            values = np.array(by_token)
            facts = {"tokens": len(values), "mean": round(float(values.mean()), 2), "most": int(values.max())}
            results[name] = facts | {"0.95": float(np.quantile(values, 0.95)), "vocabulary": engine.card.n_vocab}
            print(f"{name}: {results[name]}", flush=True)
    report({"benchmark": "predicate_tests", "results": {options.model: results}}, options.json_out)


if __name__ == "__main__":
    main()
