"""Measure the search for quotations: rows, forwards and seconds against scoring every span.

    python benchmarks/speed/extract.py qwen2.5-coder-1.5b --every

Asks questions about a passage. With --every, each span is scored, too, one token a forward, and the best must be the
ones found. Ends with one line of JSON; exit code 1 where they are not.
"""

import argparse
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import edgedec
from edgedec_apps.bench.provenance import report
from edgedec_apps.extraction import Extraction, extract, question_text
from edgedec_apps.span_search import starts_of

PASSAGE = (
    "The lighthouse at Cape Orin was built between 1871 and 1874 by the engineer Marta Lindqvist, after three "
    "ships had been lost on the reef in a single winter. It is 41 metres tall and stands on a granite base of 12 "
    "metres. Until 1926 its lamp burned rapeseed oil; then it was changed to electricity, which came over a cable "
    "from the village of Sund, 7 kilometres away. The keepers, never fewer than two, lived in a house beside the "
    "tower with their families. The last of them, Piet Aalders, left in 1983, when the light became automatic. "
    "Today the house is a museum, which about 19,000 people visit every year, most of them in July. The tower "
    "itself is closed, because its stairs are not safe, but the gallery can be seen on a film that is shown in "
    "the former oil store."
)
QUESTIONS = (
    "Who built the lighthouse?",
    "What did the lamp burn before it was electric?",
    "When did the last keeper leave?",
    "How many people visit the museum in a year?",
    "Why is the tower closed?",
    "Where did the electricity come from?",
)


def every_span(engine: edgedec.Engine, question: str, most: int) -> tuple[list[float], int, float]:
    """Return the log-probabilities of all spans, the highest first, how many rows that took, and the seconds."""
    prompt = engine.chat_ids([{"role": "user", "content": question_text(question, PASSAGE)}])
    tokenizer, found, n_rows = engine.tokenizer, dict[tuple[int, ...], float](), 0
    end_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]

    def logprobs(row: Any) -> Any:
        wide = row.astype(np.float64)
        return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())

    with closing(engine.session()) as session:
        first = logprobs(session.forward(np.array(prompt, np.int32), n_past=0).logits[0])
        began = perf_counter()
        for start in starts_of(tokenizer, PASSAGE, "", most):
            tokens = np.array(start.token_ids, np.int32)
            rows = session.forward(tokens, n_past=len(prompt), rows="all").logits
            n_rows += len(tokens)
            total, after = 0.0, first
            for i, token in enumerate(start.token_ids):
                total += float(after[token])
                after = logprobs(rows[i])
                if start.ends[i] >= 0:
                    found[tuple(start.token_ids[: i + 1])] = total + float(np.logaddexp.reduce(after[end_ids]))
        return sorted(found.values(), reverse=True), n_rows, perf_counter() - began


def answered(question: str, found: Extraction) -> dict[str, Any]:
    """Return what a search led to."""
    return {
        "question": question,
        "spans": [[round(span.probability, 4), span.text] for span in found.spans],
        "n_rows": found.n_rows,
        "n_forwards": found.n_forwards,
        "n_span_tokens": found.n_span_tokens,
        "search_s": round(found.total_s - found.prompt_s, 3),
        "total_s": round(found.total_s, 3),
    }


def main() -> None:
    """Ask, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--every", action="store_true", help="score every span, too")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    results, n_wrong = [], 0
    with edgedec.load(args.model, runtime="cpu", draft="off", offline=True) as engine:
        for number, question in enumerate(QUESTIONS):
            found = extract(engine, question, PASSAGE, n=args.n, max_tokens=args.max_tokens)
            result = answered(question, found)
            if args.every and number < 2:
                best, n_rows, seconds = every_span(engine, question, args.max_tokens)
                own = [span.logprob for span in found.spans]
                n_wrong += not np.allclose(own, best[: args.n], atol=1e-3)
                result["every"] = {"n_rows": n_rows, "seconds": round(seconds, 2)}
            results.append(result)
            print(result, flush=True)
    settings = {name: getattr(args, name) for name in ("model", "n", "max_tokens")}
    document = {"benchmark": "extract"} | settings | {"n_wrong": n_wrong, "results": results}
    report(document, args.json_out)
    raise SystemExit(1 if n_wrong else 0)


if __name__ == "__main__":
    main()
