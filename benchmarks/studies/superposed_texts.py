"""Measure what superposed texts are worth: their perplexity under the model, against those of k real forks.

    python benchmarks/studies/superposed_texts.py smollm2-135m --prompts prompts.jsonl --n-prompts 20

Superposed Decoding (Shen et al. 2024, arXiv:2405.18400) writes k texts with one row a token: the weighted mean of the
embeddings of their last tokens enters a copy of the model in floats, and each of the k texts is tried with each of the
most probable next tokens; the k best of these go on. What tells the texts apart is the law of n-grams after each of
them, with the share `alpha` in the logarithm: counted in the file's other prompts (two to six tokens, by the paper's
weights; what these leave is filled with the model's shared row), or the model's law after the last five tokens of a
text alone, as a table of six-grams of boundless size that the model wrote would say it. Real forks are written and all
texts are judged by the cpu runtime. No text may end. Ends with one line of JSON.
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "texts"))

from cached_floats import Cache, CachedFloats
from float_truth import F32, F64, log_softmax
from numpy.typing import NDArray

import edgedec
from edgedec.choosing.partial_texts import PartialText, best_tokens
from edgedec.gguf.file import read_gguf
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.prompts import BenchPrompt, read_prompts
from edgedec_apps.bench.provenance import provenance

Ids = tuple[int, ...]
Evidence = Callable[[Ids, list[int], F64], F64]  # (text with prompt, next tokens, those' log-probs) -> log-probs
Way = tuple[float, Evidence | None]  # temperature of the shared row, what tells the texts apart
_WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)  # of n-grams of 2 to 6 tokens, those of the paper's program
_ALPHA, _TEMPERATURES, _TRIED = 0.54, (0.06, 1.0), 9  # the paper's program's; it has only the first temperature


@dataclass(frozen=True)
class Task:
    """What is written for each prompt.

    Attributes:
        k: Texts of a prompt.
        n_tokens: Tokens of a text.
        ends: bool[n_vocab], the tokens that would end a text; none of them is taken.
    """

    k: int
    n_tokens: int
    ends: NDArray[np.bool_]

    def allowed(self, row: F32) -> F32:
        """Return a row f32[n_vocab] of logits without end tokens."""
        return np.where(self.ends, np.float32(-np.inf), row)


@dataclass
class Superposition:
    """The texts of one prompt: what the model has read of them, and each with its score."""

    prompt: Ids
    cache: Cache
    row: F32
    texts: list[tuple[float, Ids]]

    def grow(self, k: int, temperature: float, evidence: Evidence | None) -> None:
        """Try all texts with all of the most probable tokens, and keep the k best."""
        best = best_tokens(self.row, _TRIED)
        law = log_softmax(self.row[best].astype(np.float64) / temperature)
        plain = log_softmax(self.row.astype(np.float64))[best]
        tried = list[tuple[float, Ids]]()
        for score, ids in self.texts:
            said = law if evidence is None else evidence((*self.prompt, *ids), best, plain)
            share = 0.0 if evidence is None else _ALPHA
            scores = score + (1 - share) * law + share * said
            tried += [(float(s), (*ids, token)) for s, token in zip(scores, best, strict=True)]
        self.texts = sorted(tried, reverse=True)[:k]

    def mixture(self, model: CachedFloats) -> F64:
        """Return f64[1, n_embd], the mean of the last tokens' embeddings, weighted by the texts' probabilities."""
        weights = np.exp(log_softmax(np.array([score for score, _ in self.texts])))
        return weights[None] @ model.embeddings([ids[-1] for _, ids in self.texts])


def superposed(
    model: CachedFloats, prompts: Sequence[tuple[Ids, Cache, F32]], task: Task, ways: Mapping[str, Way]
) -> dict[str, list[list[Ids]]]:
    """Return the k texts of each prompt by each way, all of which are written side by side."""
    now = {name: [Superposition(ids, dict(cache), row, [(0.0, ())]) for ids, cache, row in prompts] for name in ways}
    every = [text for group in now.values() for text in group]
    for n in range(task.n_tokens):
        for name, (temperature, evidence) in ways.items():
            for text in now[name]:
                text.grow(task.k, temperature, evidence)
        if n + 1 < task.n_tokens:
            rows = model.forward([text.mixture(model) for text in every], [text.cache for text in every])
            for text, row in zip(every, rows, strict=True):
                text.row = task.allowed(row)
    return {name: [[ids for _, ids in text.texts] for text in group] for name, group in now.items()}


def counted(texts: Sequence[Ids]) -> Evidence:
    """Return the law of n-grams of some texts."""
    counts: dict[Ids, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for n in range(1, len(_WEIGHTS) + 1):
            for i in range(len(text) - n):
                counts[text[i : i + n]][text[i + n]] += 1

    def evidence(ids: Ids, tokens: list[int], law: F64) -> F64:
        known = [(weight, counts.get(ids[-n:])) for n, weight in enumerate(_WEIGHTS, start=1)]
        found = [(weight, count, count.total()) for weight, count in known if count is not None]
        rest = 1 - sum(weight for weight, _, _ in found)
        shares = [sum(weight * count[token] / total for weight, count, total in found) for token in tokens]
        result: F64 = np.log(np.array(shares) + rest * np.exp(law))
        return result

    return evidence


def of_the_model(session: Any) -> Evidence:
    """Return the model's law after the last five tokens of a text."""
    known: dict[Ids, F64] = {}

    def evidence(ids: Ids, tokens: list[int], law: F64) -> F64:
        last = ids[-len(_WEIGHTS) :]
        if last not in known:
            known[last] = log_softmax(session.forward(np.array(last, np.int32), n_past=0).logits[0].astype(np.float64))
        return known[last][tokens]

    return evidence


def forked(engine: edgedec.Engine, prompt: Ids, way: str, task: Task) -> list[Ids]:
    """Return k texts of k real forks: beams, greedy ones after the k best first tokens, or sampled ones."""
    rng = np.random.default_rng(0)
    with engine.partial_texts(prompt, max_tokens=task.n_tokens) as texts:
        now = [texts.begin()]
        for n in range(task.n_tokens):
            laws = [log_softmax(task.allowed(text.logits).astype(np.float64)) for text in now]
            if way == "beams" or (n == 0 and way == "greedy"):
                chosen = _best(now, laws, task.k)
            elif way == "greedy":
                chosen = [(text, int(law.argmax())) for text, law in zip(now, laws, strict=True)]
            else:
                pairs = list(zip(now, laws, strict=True)) * (task.k if n == 0 else 1)
                chosen = [(text, _drawn(law, rng)) for text, law in pairs]
            left = [text for text in now if all(text is not parent for parent, _ in chosen)]
            now = texts.advance(chosen)
            texts.drop(*left)
        return [text.token_ids for text in sorted(now, key=lambda text: -text.logprob)]


def _best(texts: Sequence[PartialText], laws: Sequence[F64], k: int) -> list[tuple[PartialText, int]]:
    tried = [
        (text.logprob + float(law[token]), i, token)
        for i, (text, law) in enumerate(zip(texts, laws, strict=True))
        for token in best_tokens(law, k)
    ]
    return [(texts[i], token) for _, i, token in sorted(tried, reverse=True)[:k]]


def _drawn(law: F64, rng: np.random.Generator, top_p: float = 0.9) -> int:
    """Return a token of the nucleus."""
    order = np.argsort(-law)
    probs = np.exp(law[order])
    probs = probs[: int(np.searchsorted(probs.cumsum(), top_p)) + 1]
    return int(order[rng.choice(len(probs), p=probs / probs.sum())])


def surprise(session: Any, prompt: Ids, text: Ids) -> float:
    """Return the mean of -log p of a text's tokens under the model."""
    begin = min(session.n_cached, len(prompt) - 1)
    ids = np.array([*prompt, *text[:-1]][begin:], np.int32)
    wanted = np.arange(len(ids) - len(text), len(ids), dtype=np.int32)
    law = log_softmax(session.forward(ids, n_past=begin, rows=wanted).logits.astype(np.float64))
    return -float(law[np.arange(len(text)), list(text)].mean())


def judged(session: Any, prompts: Sequence[Ids], found: Sequence[Sequence[Ids]]) -> dict[str, float]:
    """Return the perplexity of all texts, of each prompt's first and worst, and the share of bigrams that differ."""
    every = list[list[float]]()
    for prompt, texts in zip(prompts, found, strict=True):
        session.forward(np.array(prompt, np.int32), n_past=0)
        every.append([surprise(session, prompt, text) for text in texts])
    bigrams = [[pair for text in texts for pair in pairwise(text)] for texts in found]
    return {
        "perplexity": math.exp(np.mean(every)),
        "of_the_first": math.exp(np.mean([values[0] for values in every])),
        "of_the_worst": math.exp(np.mean([max(values) for values in every])),
        "distinct_bigrams": float(np.mean([len(set(pairs)) / len(pairs) for pairs in bigrams])),
    }


def measured(engine: edgedec.Engine, prompts: Sequence[BenchPrompt], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each way, and the texts of the first prompt."""
    mine, n_vocab = prompts[: args.n_prompts], len(engine.session().forward(np.zeros(1, np.int32), n_past=0).logits[0])
    task = Task(args.k, args.max_tokens, np.array([engine.tokenizer.is_end(token) for token in range(n_vocab)]))
    ids = [tuple(engine.chat_ids([{"role": "user", "content": prompt.text}])) for prompt in mine]
    model = CachedFloats(read_gguf(resolve(args.model, ResolveOptions(offline=True))))
    read = list[tuple[Ids, Cache, F32]]()
    for prompt in ids:
        cache: Cache = {}
        row = model.forward([model.embeddings(list(prompt))], [cache])[0]
        read.append((prompt, cache, task.allowed(row)))
    texts = [tuple(engine.prompt_ids(prompt.text)) for prompt in prompts[args.n_prompts :]]
    session = engine.session()
    kinds: dict[str, Evidence | None] = {"": None, " + n-grams": counted(texts), " + model": of_the_model(session)}
    ways = {f"superposed {t:g}{name}": (t, kind) for t in _TEMPERATURES for name, kind in kinds.items()}
    found = superposed(model, read, task, ways)
    found |= {way: [forked(engine, prompt, way, task) for prompt in ids] for way in ("beams", "greedy", "sampled")}
    return {
        "n_counted_tokens": sum(map(len, texts)),
        "n_prompt_tokens": sum(map(len, ids)),
        "results": {way: judged(session, ids, each) for way, each in found.items()},
        "examples": {way: [engine.tokenizer.decode(text) for text in each[0]] for way, each in found.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="chat prompts first; n-grams are of the others")
    parser.add_argument("--n-prompts", type=int, default=20)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of the cpu runtime")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    line = {"benchmark": "superposed_texts", "model": args.model, "k": args.k, "n_prompts": args.n_prompts}
    line |= {"max_tokens": args.max_tokens, "prompts": args.prompts.name} | provenance()
    with edgedec.load(args.model, runtime="cpu", draft="off", offline=True, n_threads=args.threads) as engine:
        found = measured(engine, read_prompts(args.prompts), args)
    for name, figures in found["results"].items():
        print(f"{name:28}", *(f"{key} {value:7.3f}" for key, value in figures.items()))
    text = json.dumps(line | found)
    print(text)
    if args.json_out is not None:
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
