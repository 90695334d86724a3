"""Records what drafters propose at every position of texts, and what forwards take, for benchmarks/studies/policy.py.

    python benchmarks/studies/policy_recorder.py smollm2-135m --prompts PROMPTS.jsonl --tokens 192 --out FILE.json.gz

The texts are those of plain decoding, greedy and at temperature 0.7. Every drafter is asked at every position for as
much as it can draft, and nothing of that is verified.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgedec
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory
from edgedec.drafters.head import HeadDrafter
from edgedec.model import Session
from edgedec_apps.bench.provenance import provenance

N_MAX = 15
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
CONTEXTS = (64, 1024)


class Noting:
    """A drafter that passes every call on, notes what is proposed, and proposes nothing itself."""

    def __init__(self, name: str, drafter: Drafter, notes: dict[str, Any]) -> None:
        self.name, self.drafter, self.notes, self.needs = name, drafter, notes, drafter.needs
        self.drafts: list[Any] = notes["drafts"].setdefault(name, [])
        self.n_read, self.begun_s = 0, 0.0

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.n_read = len(token_ids)
        self.begun_s = self.drafter.state.read_s if isinstance(self.drafter, HeadDrafter) else 0.0
        self.drafter.begin(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Note a whole draft, its seconds and, now and then, those of a shorter one."""
        for n in (N_MAX, *((1, 4) if len(self.drafts) % 8 == 0 else ())):
            begun = perf_counter()
            draft = self.drafter.propose(n, monotonic() + 60)
            seconds = perf_counter() - begun
            if len(draft):
                # a head drafts as many levels as it is asked for, whatever room its leaves leave
                self.notes["seconds"].append((self.name, n if self.name == "head" else max(draft.depths()), seconds))
            if n == N_MAX:
                self.drafts.append([draft.tokens, draft.parents, [round(p, 3) for p in draft.p_accept]])
        return EMPTY_DRAFT

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Pass the step on, and note what reading along has taken."""
        begun = perf_counter()
        self.drafter.learn(verification, hidden)
        self.notes["taught"].append((self.name, perf_counter() - begun))
        self.n_read += len(verification.token_ids)
        if isinstance(self.drafter, HeadDrafter):
            self.notes["read"].append((self.drafter.state.read_s - self.begun_s) / self.n_read)

    def memory_bytes(self) -> int:
        """Return the bytes of the drafter."""
        return self.drafter.memory_bytes()


def noting(name: str, factory: DrafterFactory, notes: dict[str, Any]) -> DrafterFactory:
    """Return a factory whose drafters are noted."""

    def make(context: DraftContext) -> Drafter:
        return Noting(name, factory(context), notes)

    return make


def quick(seconds: Iterable[float]) -> float:
    """Return the seconds that a fifth of the calls stay below: others shared the machine."""
    return round(float(np.quantile(list(seconds), 0.2)), 7)


def forwards(session: Session, repeats: int) -> dict[str, dict[str, float]]:
    """Return the least seconds of forwards by context and number of rows."""
    rng, found = np.random.default_rng(0), dict[str, dict[str, float]]()
    most = session.model.capabilities.max_rows
    for n_past in CONTEXTS:
        filled = rng.integers(0, session.model.card.n_vocab, n_past, dtype=np.int32)
        for i in range(0, n_past, 64):
            session.forward(filled[i : i + 64], n_past=i)
        seconds = found[str(n_past)] = {}
        for _ in range(repeats):
            for n in (n for n in ROWS if n <= (most if n_past == CONTEXTS[0] else 2)):
                tokens = rng.integers(0, session.model.card.n_vocab, n, dtype=np.int32)
                begun = perf_counter()
                session.forward(tokens, n_past=n_past, rows="all")
                seconds[str(n)] = min(seconds.get(str(n), 1e9), round(perf_counter() - begun, 6))
    return found


def main() -> None:
    """Record, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    load: dict[str, Any] = {"n_ctx": 2048, "runtime": "cpu", "offline": True}
    with edgedec.load(args.model, draft=None, **load) as engine:
        costs: dict[str, Any] = {"forward": forwards(engine.session(2048), args.repeats)}
    notes: dict[str, Any] = {"seconds": [], "taught": [], "read": []}
    texts = list[dict[str, Any]]()
    with edgedec.load(args.model, draft="suffix+common+head", **load) as engine:
        drafting = engine.pool.slots[0].drafting
        assert drafting is not None
        plain = dict(drafting.factories)
        drafting.factories = {name: noting(name, factory, notes) for name, factory in plain.items()}
        for temperature, prompt in product((0.0, 0.7), prompts):
            notes["drafts"] = {}
            engine.forget()
            ids = engine.chat_ids([{"role": "user", "content": prompt["turns"][0]}])
            made = engine.generate(ids, max_tokens=args.tokens, temperature=temperature, seed=7)
            text = {"id": prompt["id"], "temperature": temperature, "n_prompt": len(ids), "tokens": made.token_ids}
            texts.append(text | {"drafts": notes["drafts"]})
            print(prompt["id"], temperature, len(made.token_ids), made.text[:60].replace("\n", " "), flush=True)
    for name in plain:
        timed = [(depth, seconds) for each, depth, seconds in notes["seconds"] if each == name]
        depths = sorted({depth for depth, _ in timed})
        costs[name] = {
            "by_depth": {str(n): quick(seconds for depth, seconds in timed if depth == n) for n in depths},
            "learn": quick(seconds for each, seconds in notes["taught"] if each == name),
        }
    costs["head"]["read"] = quick(notes["read"])
    document = {"model": args.model, **provenance(), "costs": costs, "texts": texts}
    with gzip.open(args.out, "wt", encoding="utf-8", compresslevel=9) as out:
        json.dump(document, out, separators=(",", ":"))
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
