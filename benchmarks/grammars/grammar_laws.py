"""Measure how far the law of texts under a grammar is from the model's own law of texts that keep to it.

    python benchmarks/grammars/grammar_laws.py smollm2-135m
    python benchmarks/grammars/grammar_laws.py smollm2-135m --cases capital

The grammar has few texts, so every law is enumerated: the logits after each of its beginnings are computed once, and
all draws below read them. KL is that of the law of the texts from the model's own law, in nats: for a mask alone; for
edgedec_methods.constrained with n texts (the mean of the weights of many runs, so a little too large); and for
edgedec_methods.futures after some texts (exact, mean of several runs).
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgedec
from edgedec.choosing.partial_texts import PartialTexts
from edgedec.constraint import Constraint, DrawPlace
from edgedec.decoding.grammars import Grammars
from edgedec.grammar import Grammar
from edgedec.sampling import Noise, SamplingParams, distribution
from edgedec.sequence import Request
from edgedec_apps.bench.provenance import provenance
from edgedec_methods.constrained import constrained
from edgedec_methods.futures import Futures

CASES = {
    "capital": ("The capital of France is", r" (Paris, Texas|Paris, Ontario|Lyon|Marseille|London|Rome|Nice)\."),
    "sentence": ("Once upon a time", r", there (was|lived) a (girl|man|king|house|very old)[,.]"),
}
Ids = tuple[int, ...]
Rows = dict[Ids, NDArray[np.float32]]


class Known:
    """Implements BranchesOfPrompt by logits that are known."""

    root = 0

    def __init__(self, rows: Rows) -> None:
        self.rows, self.logits, self._held, self._n = rows, rows[()], {0: Ids()}, 1

    def fork(self, branch: int) -> Sequence[int]:
        """Open a branch that holds the same."""
        self._held[self._n] = self._held[branch]
        self._n += 1
        return [self._n - 1]

    def drop(self, branch: int) -> None:
        """Forget a branch."""
        del self._held[branch]

    def forward(self, tokens: Mapping[int, Sequence[int]]) -> Mapping[int, NDArray[np.float32]]:
        """Add tokens."""
        for branch, ids in tokens.items():
            self._held[branch] += tuple(ids)
        return {branch: self.rows.get(self._held[branch], self.logits)[None] for branch in tokens}


def enumerated(engine: edgedec.Engine, prompt: str, constraint: Constraint) -> tuple[Rows, dict[Ids, float]]:
    """Return the logits after every beginning of the grammar's texts, and the log-probability of every text."""
    rows, laws, session = Rows(), dict[Ids, float](), engine.session()
    prompt_ids = list(engine.prompt_ids(prompt))
    texts: list[tuple[Ids, float]] = [((), 0.0)]
    while texts:
        text, logprob = texts.pop()
        rows[text] = session.forward(np.array([*prompt_ids, *text], np.int32), n_past=0).logits[0].copy()
        law = rows[text].astype(np.float64) - rows[text].max()
        law -= math.log(np.exp(law).sum())
        for token in np.flatnonzero(constraint.allowed(text)).tolist():
            ids = (*text, token)
            ends = engine.tokenizer.is_end(token) or (constraint.allows(text, token) and not _goes_on(constraint, ids))
            if ends:
                laws[ids] = logprob + float(law[token])
            else:
                texts.append((ids, logprob + float(law[token])))
    session.close()
    return rows, laws


def _goes_on(constraint: Constraint, path: Ids) -> bool:
    """Return whether a token other than an end token may follow a path."""
    constraint._move_to(path)
    return not constraint._state.is_complete


def divergence(found: Mapping[Ids, float], law: Mapping[Ids, float]) -> float:
    """Return KL(found || law) in nats."""
    return sum(p * math.log(p / law[ids]) for ids, p in found.items() if p > 0)


def drawn_law(engine: Any, rows: Rows, law: Mapping[Ids, float], n: int, runs: int, opener: Any) -> dict[Ids, float]:
    """Return the estimated law of the text that is drawn from n weighted ones."""
    shares, is_end = defaultdict[Ids, float](float), engine.tokenizer.is_end
    named = {ids[:-1] if is_end(ids[-1]) else ids: ids for ids in law}
    for run in range(runs):
        tokenizer = engine.tokenizer
        with PartialTexts(Known(rows), (1,), is_end=tokenizer.is_end, decode=tokenizer.decode, max_tokens=40) as texts:
            found = constrained(texts, n, opener, seed=10_000 * run)
        weights = np.exp(found.log_weights - found.log_weights.max())
        for text, weight in zip(found.texts, weights / weights.sum(), strict=True):
            shares[named[text.token_ids]] += float(weight) / runs
    return shares


def law_now(rows: Rows, law: Mapping[Ids, float], constraint: Constraint) -> dict[Ids, float]:
    """Return the law of the next text of a constraint, by the masked rows."""
    params, found = SamplingParams(1.0, top_p=1.0), dict[Ids, float]()
    texts: list[tuple[Ids, float]] = [((), 1.0)]
    while texts:
        text, p = texts.pop()
        now = distribution(constraint.masked(rows[text], text), params)
        for token, share in zip(now.token_ids.tolist(), now.probs.tolist(), strict=True):
            ids = (*text, token)
            if ids in law:
                found[ids] = p * share
            else:
                texts.append((ids, p * share))
    return found


def learned(
    grammars: Grammars, grammar: Grammar, rows: Rows, law: Mapping[Ids, float], seed: int, after: Sequence[int]
) -> list[float]:
    """Return the KL before and after some numbers of texts, each of which taught its Futures."""
    futures, found, params = Futures(), list[float](), SamplingParams(1.0, top_p=1.0)
    for n in range(max(after) + 1):
        constraint = grammars.open(grammar, Request((), params, 0, methods={"futures": futures}))
        constraint.begin(40)
        if n in after:
            found.append(divergence(law_now(rows, law, constraint), law))
        text: Ids = ()
        while not constraint.is_over and text not in law:
            row = rows[text]
            token = constraint.choose(DrawPlace(row, params, (), Noise(1000 * seed + n), len(text)), ())
            constraint.log_mass(row, (), 1.0)
            text = (*text, constraint.commit(token))
        constraint.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="only these grammars")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--after", type=int, nargs="+", default=[0, 1, 4, 16, 64, 256])
    parser.add_argument("--texts", type=int, default=4000, help="written for each size")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    results, made_by = dict[str, Any](), provenance()
    with edgedec.load(args.model, runtime="cpu", draft="off", offline=True) as engine:
        for name in args.cases:
            prompt, pattern = CASES[name]
            grammar, grammars = Grammar.regex(pattern), Grammars(engine.tokenizer)
            rows, laws = enumerated(engine, prompt, grammars.open(grammar))
            mass = sum(math.exp(logprob) for logprob in laws.values())
            law = {ids: math.exp(logprob) / mass for ids, logprob in laws.items()}
            mask = divergence(law_now(rows, law, grammars.open(grammar)), law)

            def opener(grammar: Grammar = grammar, grammars: Grammars = grammars) -> Constraint:
                return grammars.open(grammar)

            several = [drawn_law(engine, rows, law, n, max(8, args.texts // n), opener) for n in args.sizes]
            runs = [learned(grammars, grammar, rows, law, seed, sorted(args.after)) for seed in range(5)]
            results[name] = {
                "texts": len(law),
                "mass": mass,
                "mask": mask,
                "several": {n: divergence(found, law) for n, found in zip(args.sizes, several, strict=True)},
                "futures": dict(zip(sorted(args.after), np.mean(runs, axis=0).tolist(), strict=True)),
            }
            print(json.dumps({name: results[name]}, indent=1))
    text = json.dumps({"benchmark": "grammar_laws", "model": args.model, "results": results} | made_by)
    print(text)
    if args.json_out is not None:
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
