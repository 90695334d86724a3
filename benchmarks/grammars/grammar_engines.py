"""Compare JSON schemas here and in llama.cpp, in one run: which are taken, and what compiling and masks cost.

    python benchmarks/grammars/grammar_engines.py data --first 100 --json-out FILE
    python benchmarks/grammars/grammar_engines.py data --first 100 --speed 6

The folder is that of benchmarks/grammars/json_schemas.py. llama.cpp's grammar is the one of llama-cpp-python
(LlamaGrammar.from_json_schema, then llama_sampler_init_grammar). Under each schema that an engine takes, random tokens
are drawn by that engine's masks, with the same random numbers; texts that come to their end are judged by the package
jsonschema. Times are of the processor. Each schema of llama.cpp's runs in a process of its own for at most some
seconds, as a grammar may end a process. With --speed N, the model answers under the first N schemas that both take,
greedily, as in `edgedec bench`: here with drafts and without, and by llama-cpp-python. Ends with one line of JSON.
"""

import argparse
import json
import os
import pickle
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
from json_coverage import Walk, _spread, _value
from json_schemas import _judge, schemas
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import edgedec
from edgedec.constraint import Constraint
from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.provenance import provenance
from edgedec_runtimes.llamacpp.library import llama

_SECONDS = 20


class GbnfState:
    """A sampler of llama.cpp's grammar as edgedec.constraint.GrammarState, as far as a walk needs it."""

    predicate = None
    may_end = False

    def __init__(self, vocab: Any, source: str, end_ids: list[int], n_vocab: int) -> None:
        import llama_cpp
        from llama_cpp._internals import LlamaTokenDataArray

        self._api, self._ends, self._n_vocab = llama_cpp, end_ids, n_vocab
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, source.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp does not take its own grammar of this schema")
        self._data = LlamaTokenDataArray(n_vocab=n_vocab)
        self.is_complete = False

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow."""
        self._data.copy_logits(np.zeros(self._n_vocab, np.float32))
        self._api.llama_sampler_apply(self._sampler, self._data.candidates)
        data = self._data.candidates_data[: self._data.candidates.size]
        found = np.zeros(self._n_vocab, np.bool_)
        found[data.id[np.isfinite(data.logit)]] = True
        if not found.any():
            raise RequestError("no token is allowed")
        return found

    def forced(self) -> tuple[int, ...]:
        """Return no token."""
        return ()

    def advance(self, token_id: int) -> bool:
        """Take a token that is allowed."""
        if token_id in self._ends:
            self.is_complete = True
        else:
            self._api.llama_sampler_accept(self._sampler, token_id)
        return True

    def back(self, n_tokens: int) -> None:
        """Walks don't go back."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the sampler."""
        self._api.llama_sampler_free(self._sampler)


def forked(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a job returns in a process of its own; a state of "crashed" or "too slow" where it did not."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)
        with open(writes, "wb") as pipe:
            pipe.write(pickle.dumps(job()))
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    if status or not data:
        return {"state": "too slow" if os.WTERMSIG(status) == signal.SIGALRM else "crashed"}
    return dict(pickle.loads(data))


def outcome(
    schema: dict[str, Any], open_state: Callable[[], Constraint], walk: Walk, judge: Any, seed: int
) -> dict[str, Any]:
    """Return what a schema led to: the state of its text, and milliseconds for compiling and for each mask."""
    began = process_time()
    try:
        constraint = open_state()
    except (
        RequestError,
        ValueError,
        RecursionError,
        NotImplementedError,
        KeyError,
        TypeError,
        AssertionError,
    ) as error:
        return {"state": "refused", "why": f"{type(error).__name__}: {error}"[:120]}
    found: dict[str, Any] = {"compile_ms": 1000 * (process_time() - began)}
    try:
        text, seconds = walk(constraint, seed)
    except RequestError as error:
        return found | {"state": "stuck", "why": str(error)[:120]}
    found["mask_ms"] = [1000 * each for each in seconds]
    if text is None:
        return found | {"state": "cut"}
    try:
        state, fault = judge(_value(text), schema)
    except ArithmeticError as error:  # an exponent that no Decimal holds
        state, fault = "unchecked", repr(error)
    except ValueError as error:
        state, fault = "broken", repr(error)
    return found | {"state": state, "why": fault[:120]}


def gbnf(vocab: Any, schema: dict[str, Any], end_ids: list[int], n_vocab: int) -> Constraint:
    """Return the constraint of llama.cpp's grammar of a schema."""
    from llama_cpp import LlamaGrammar

    with redirect_stderr(StringIO()):
        source = LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)._grammar
    return Constraint(GbnfState(vocab, source, end_ids, n_vocab))


def compared(engine: edgedec.Engine, path: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    """Return the figures of both engines, and the schemas that both take."""
    llama()  # checks the version, and redirects the log
    import llama_cpp as api

    vocab_only = api.Llama(str(path), vocab_only=True, verbose=False)
    vocab, tokenizer = vocab_only._model.vocab, engine.tokenizer
    end_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]
    grammars, walk, judge = Grammars(tokenizer), Walk(tokenizer, 150), _judge()
    grammars.open(Grammar.json_schema({})).close()  # sorts the vocabulary
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    both = []
    given = list(schemas(args.path, args.first))
    for seed, (_, schema) in enumerate(track(given, "schemas", console=Console(stderr=True))):

        def ours(schema: dict[str, Any] = schema) -> Constraint:
            return grammars.open(Grammar.json_schema(schema))

        def theirs(schema: dict[str, Any] = schema) -> Constraint:
            return gbnf(vocab, schema, end_ids, tokenizer.n_vocab)

        rows["edgedec"].append(outcome(schema, ours, walk, judge, seed))
        rows["llama.cpp"].append(forked(lambda: outcome(schema, theirs, walk, judge, seed)))  # noqa: B023
        if all(rows[name][-1]["state"] in ("valid", "cut") for name in rows):
            both.append(schema)
    vocab_only.close()
    return {name: figures(found) for name, found in rows.items()}, both


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the schemas of an engine add up to."""
    bad = [row["why"] for row in rows if row["state"] in ("invalid", "broken", "stuck")]
    return {
        "n": len(rows),
        "states": dict(Counter(row["state"] for row in rows).most_common()),
        "compile_ms": _spread([row["compile_ms"] for row in rows if "compile_ms" in row]),
        "mask_ms": _spread([each for row in rows for each in row.get("mask_ms", ())]),
        "refused": [row["why"] for row in rows if row["state"] == "refused"][:20],
        "wrong": bad[:20],
    }


def speeds(engine: edgedec.Engine, path: Path, found: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a second after the first, as the median over the schemas, by way."""
    llama()  # checks the version, and redirects the log
    import llama_cpp as api

    other = api.Llama(str(path), n_ctx=1024, verbose=False, n_threads=os.cpu_count())
    rates: dict[str, list[float]] = defaultdict(list)
    for schema in track(found, "answers", console=Console(stderr=True)):
        prompt = "Write one JSON value that is valid under this JSON schema:\n" + json.dumps(schema)[:300]
        ids = engine.chat_ids([{"role": "user", "content": prompt}])
        chosen: dict[str, Any] = {"temperature": 0.0, "max_tokens": args.max_tokens}
        for way, options in (
            ("edgedec, drafts", {"json_schema": schema}),
            ("edgedec, no drafts", {"json_schema": schema, "draft": False}),
            ("edgedec, no drafts, no schema", {"ignore_end": True, "draft": False}),
        ):
            rates[way] += _rate(out.token_id for out in engine.stream(ids, **chosen, **options))
        with redirect_stderr(StringIO()):
            grammar = api.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False)
        for way, keeps_to in (("llama.cpp", grammar), ("llama.cpp, no schema", None)):
            other.reset()
            made = other.create_completion(list(ids), grammar=keeps_to, stream=True, **chosen)
            rates[way] += _rate(1 for each in made if each["choices"][0]["text"])
    other.close()
    return {way: {"n": len(each), "tokens_per_s": round(median(each), 1)} for way, each in rates.items() if each}


def _rate(tokens: Iterator[Any]) -> list[float]:
    """Return the tokens a second after the first as a list of one; none for texts of fewer than eight."""
    times = [perf_counter() for _ in tokens]
    return [(len(times) - 1) / (times[-1] - times[0])] if len(times) >= 8 else []


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--speed", type=int, default=0, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    path = resolve(args.model, ResolveOptions(offline=True))
    with edgedec.load(args.model, runtime="cpu", offline=True) as engine:
        results, both = compared(engine, path, args)
        if args.speed:
            results["speed"] = speeds(engine, path, both[:: max(1, len(both) // args.speed)][: args.speed], args)
    document = {"benchmark": "grammar_engines", "model": args.model, "results": results} | provenance()
    print(json.dumps(document, indent=1))
    if args.json_out is not None:
        args.json_out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
