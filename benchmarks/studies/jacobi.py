"""Measure speculative Jacobi decoding: rows of rejected tokens are drawn anew, and are the next draft.

    python benchmarks/studies/jacobi.py qwen2.5-coder-1.5b --per-task 1 --max-tokens 48
    python benchmarks/studies/jacobi.py qwen2.5-coder-1.5b --rows jacobi.jsonl --width 4
    edgedec simulate jacobi.jsonl
    python benchmarks/studies/jacobi.py qwen2.5-coder-1.5b --rows auto.jsonl --of auto

SJD (Teng et al. 2024, arXiv:2410.01699) verifies a window of tokens in each step. Behind the first rejected one, every
row still says what the target expects there, given the rejected tokens; a token that is drawn from it, with the noise
of its position, is the draft of the next step. The end of the window is filled with the tokens that last followed in
the text (`bigram` is a draft of these alone, for comparison). With `--rows`, the drafts are recorded for `edgedec
simulate` with the steps that drafts of the full width make: what is proposed inside of a step is the rest of its draft.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import edgedec
from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafters.draft_builder import path_of
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.measure import RunOptions
from edgedec_apps.bench.prompts import DEFAULT_PROMPTS, prepare, read_prompts
from edgedec_apps.bench.provenance import provenance
from edgedec_apps.bench.rows import head_of, record

_K = 8  # candidates of a row


class Jacobi:
    """Implements edgedec.drafter.Drafter.

    Args:
        context: The generation's.
        width: Tokens of a draft.
        redraw: Whether rejected rows are drawn anew; without it, drafts are filled only.
    """

    needs = DrafterNeeds(candidates=_K)

    def __init__(self, context: DraftContext, width: int = 4, redraw: bool = True) -> None:
        self._context, self._width, self._redraw = context, width, redraw
        self._text: list[int] = []
        self._next: list[tuple[int, float]] = []  # tokens that were drawn anew, with their probabilities
        self._after: dict[int, int] = {}
        self._step: Draft | None = None  # of a recording
        self._n_accepted = 0  # tokens of that step
        self._n_read = 0  # tokens of the text that the recording's session holds
        self._session = (
            context.target.model.session(context.target.n_ctx) if redraw and context.recorder is not None else None
        )

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self._take(token_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._text:
                self._after[self._text[-1]] = token
            self._text.append(token)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return what was drawn anew, filled up to the width."""
        nodes = self._next[: min(n_max, self._width)]
        last = nodes[-1][0] if nodes else self._text[-1]
        while len(nodes) < min(n_max, self._width) and last in self._after:
            last = self._after[last]
            nodes = [*nodes, (last, 0.3)]
        n = len(nodes)
        return Draft(tuple(t for t, _ in nodes), tuple(range(-1, n - 1)), tuple(min(1.0, p) for _, p in nodes))

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Draw the rejected rows anew."""
        if self._session is not None:
            self._recorded(verification.token_ids)
            return
        base, found = len(self._text), verification.candidates
        self._take(verification.token_ids)
        self._next = []
        if self._redraw and found is not None:
            self._draw(found, self._rejected(found, base))

    def _draw(self, found: Candidates, rows: Sequence[int]) -> None:
        self._next = [self._drawn(found, row, len(self._text) + i) for i, row in enumerate(rows)]

    def _recorded(self, token_ids: Sequence[int]) -> None:
        """Follow the steps of drafts of the full width through a recording, whose every token is a step."""
        for token in token_ids:
            draft = self._step if self._step is not None else self.propose(self._width, 0.0)
            n = self._n_accepted
            self._take([token])
            if n < len(draft.tokens) and draft.tokens[n] == token:
                self._step, self._n_accepted = draft, n + 1
                self._next = list(zip(draft.tokens, draft.p_accept, strict=True))[n + 1 :]
            else:  # the step's last token, after which the rejected rows are drawn anew
                self._step, self._n_accepted, self._next = None, 0, []
                if n < len(draft.tokens):
                    self._draw(self._evaluated(len(self._text) - 1 - n, draft), range(n + 1, len(draft.tokens) + 1))

    def _evaluated(self, base: int, draft: Draft) -> Candidates:
        """Return the candidates of the last token and of the draft behind it, in a session of the recording's own."""
        assert self._session is not None
        n_past = min(self._n_read, base - 1)
        self._n_read = base
        tokens = [*self._text[n_past:base], *draft.tokens]
        wanted = np.arange(len(tokens) - len(draft.tokens) - 1, len(tokens), dtype=np.int32)
        logits = self._session.forward(np.array(tokens, np.int32), n_past=n_past, rows=wanted).logits
        rows = logits.astype(np.float64)
        rows = np.exp(rows - rows.max(axis=1, keepdims=True))
        probs = rows / rows.sum(axis=1, keepdims=True)
        ids = np.argsort(-probs, axis=1)[:, :_K].astype(np.int32)
        n = len(rows)
        taken = np.take_along_axis(probs, ids.astype(np.int64), axis=1).astype(np.float32)
        return Candidates(
            np.array([self._text[base - 1], *draft.tokens], np.int32), np.arange(-1, n - 1, dtype=np.int32), ids, taken
        )

    def _rejected(self, found: Candidates, base: int) -> list[int]:
        """Return the rows from the first rejected token on, along the longest branch."""
        tokens, parents = found.tokens.tolist(), found.parents.tolist()
        path = [0, *path_of(tokens, parents, self._text[base:], root=0)]
        last = max((row for row in range(len(tokens)) if row not in path), default=-1)
        chain = list[int]()
        while last > 0 and last not in path:
            chain.insert(0, last)
            last = parents[last]
        return chain if last == path[-1] else []

    def _drawn(self, found: Candidates, row: int, position: int) -> tuple[int, float]:
        """Return a token drawn for a position from a row, and its probability there."""
        ids, probs = found.ids[row].astype(np.int64), found.probs[row].astype(np.float64)
        temperature = self._context.sampling.temperature
        keys = np.log(np.maximum(probs, 1e-30))
        if temperature:
            keys = keys / temperature + self._context.noise.gumbel(position, ids)
        best = int(keys.argmax())
        return int(ids[best]), float(probs[best])

    def memory_bytes(self) -> int:
        """Return about nothing."""
        return 1000

    def close(self) -> None:
        """Close the recording's session."""
        if self._session is not None:
            self._session.close()


def ways_of(auto: Mapping[str, Any], widths: Sequence[int]) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the drafters of each way, and whether they are pinned."""
    ways: dict[str, tuple[dict[str, Any], bool]] = {"plain": ({}, False), "auto": (dict(auto), False)}
    for width in widths:
        ways[f"bigram {width}"] = {"bigram": partial(Jacobi, width=width, redraw=False)}, True
        ways[f"jacobi {width}"] = {"jacobi": partial(Jacobi, width=width)}, True
    ways["auto + bigram"] = {**auto, "bigram": partial(Jacobi, width=max(widths), redraw=False)}, False
    ways["auto + jacobi"] = {**auto, "jacobi": partial(Jacobi, width=max(widths))}, False
    return ways


def measured(engine: edgedec.Engine, requests: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each way and temperature; texts must be equal."""
    drafting = engine.pool.slots[0].drafting
    assert drafting is not None, "auto drafts"
    ways = {name: way for name, way in ways_of(drafting.factories, args.widths).items() if name in (args.ways or name)}
    totals: dict[tuple[float, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for request in track(requests, "prompts", console=Console(stderr=True)):
        for temperature in args.temperatures:
            texts = set()
            for way, (factories, pinned) in ways.items():
                engine.forget()
                drafting.factories, drafting.always = factories or {"bigram": Jacobi}, pinned
                made = engine.generate(
                    request.token_ids,
                    temperature=temperature,
                    seed=request.seed,
                    max_tokens=args.max_tokens,
                    ignore_end=True,
                    draft=bool(factories),
                )
                texts.add(made.token_ids)
                total, stats = totals[temperature, way], made.stats
                total["tokens"] += stats.n_generated_tokens - 1
                total["steps"] += stats.n_steps
                total["rows"] += stats.n_draft_tokens
                total["accepted"] += stats.n_accepted_tokens
                total["seconds"] += stats.total_s - stats.first_token_s
            assert len(texts) == 1, f"{request.id}: the texts differ"
    return {
        f"{temperature:g} {way}": {
            "accepted_a_step": round(total["accepted"] / total["steps"], 3),
            "rows_a_step": round(total["rows"] / total["steps"], 2),
            "tokens_per_s": round(total["tokens"] / total["seconds"], 2),
            "steps": int(total["steps"]),
        }
        for (temperature, way), total in sorted(totals.items())
    }


def main() -> None:
    """Measure and print, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--widths", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--ways", nargs="+", help="only these, as they are printed")
    parser.add_argument("--width", type=int, default=7, help="of the window that is recorded")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--per-task", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rows", type=Path, help="record drafts to this file instead")
    parser.add_argument("--of", choices=["jacobi", "bigram", "auto"], default="jacobi", help="whose drafts to record")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    made_by = provenance()
    factory: Any = partial(Jacobi, width=args.width, redraw=args.of == "jacobi")
    draft = factory if args.rows and args.of != "auto" else "auto"
    with edgedec.load(args.model, runtime="cpu", offline=True, draft=draft, draft_head="off") as engine:
        requests = prepare(engine, read_prompts(args.prompts, args.per_task), args.max_tokens)
        if args.rows:
            path = resolve(args.model, ResolveOptions(offline=True))
            options = RunOptions(max_tokens=args.max_tokens, temperature=args.temperatures[0], top_p=None)
            lines = [head_of(args.model, path), *record(engine, requests, options, path)]
            args.rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            return
        results = measured(engine, requests, args)
    for name, found in results.items():
        print(f"{name:20}", *(f"{key} {value:8}" for key, value in found.items()))
    line = {"benchmark": "jacobi", "model": args.model, "max_tokens": args.max_tokens, "n_prompts": len(requests)}
    text = json.dumps(line | {"results": results} | made_by)
    print(text)
    if args.json_out is not None:
        args.json_out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
