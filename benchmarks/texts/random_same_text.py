"""Draw random requests, and compare all that a caller sees of their texts with plain decoding, by == .

    python benchmarks/texts/random_same_text.py --requests 10000 --seed 34
    python benchmarks/texts/random_same_text.py --seed 34 --only 17

Each configuration loads an engine with drafts and one without, and asks both for the same: texts at once, parallel
requests, choices and searches, under grammars, stop strings, memory caps, with cancels and forks in the middle. A
configuration that differs is printed, and --only replays it. Ctrl-C ends the run with what was done. The exit code is 1
where anything differs, and where the run ended early.
"""

import argparse
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from drawn_requests import Asked, Config, Files, drawn
from support.models.real_models import models_dir

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.bench.provenance import report
from edgedec_methods.futures import Futures

REAL, CRASHED = "smollm2-135m", "crashed"
Seen = tuple[Any, ...]


@dataclass(slots=True)
class Outcome:
    """What became of a configuration.

    Attributes:
        number: Its number.
        n_requests: Requests made.
        n_texts: Texts of plain decoding.
        n_tokens: Their tokens.
        n_accepted: Tokens that drafts gave.
        refused: Why nothing was loaded; empty where it was.
        different: By request that differs, what plain decoding gave, and what came with drafts.
    """

    number: int
    n_requests: int = 0
    n_texts: int = 0
    n_tokens: int = 0
    n_accepted: int = 0
    refused: str = ""
    different: dict[int, tuple[Any, Any]] = field(default_factory=dict)


def seen(text: Generation) -> Seen:
    """Return all that a caller sees of a text, but for counts and times."""
    said = (text.text, text.token_ids, text.finish_reason, text.stop_string, text.is_whole)
    return (*said, text.logprob_sum, text.constraint_logprob, text.outputs, text.stats.chance_right)


class Asker:
    """Asks one engine for the requests of a configuration, one after another.

    Args:
        engine: The engine.
        plain: Gives the rest of forked texts; it has no drafts.

    Attributes:
        n_accepted: Tokens that drafts gave so far.
        texts: The texts of the latest request.
    """

    def __init__(self, engine: edgedec.Engine, plain: edgedec.Engine) -> None:
        self._engine, self._plain = engine, plain
        self._futures: dict[tuple[str, str], Futures] = {}
        self.n_accepted = 0
        self.texts: tuple[Generation, ...] = ()

    def ask(self, asked: Asked, begun: Sequence[int], predicted: str) -> Seen:
        """Return what a caller sees of a request.

        Args:
            asked: The request.
            begun: The tokens of the text that is resumed, where one is.
            predicted: What the text is expected to be; may be empty.
        """
        options = asked.request()
        if asked.learns:
            key = asked.prompt, options["grammar"].source
            options = {**options, "futures": self._futures.setdefault(key, Futures())}
        if predicted:
            options = {**options, "prediction": predicted}
        self.texts = tuple[Generation, ...]()
        try:
            call: Callable[..., Seen] = getattr(self, f"_{asked.kind}")
            found = (*call(asked, {**options, "resume": begun} if begun else options), *map(seen, self.texts))
        except EdgedecError as error:
            return (type(error).__name__,)
        except Exception:
            return CRASHED, traceback.format_exc()
        self.n_accepted += sum(text.stats.n_accepted_tokens for text in self.texts)
        return found

    def _one(self, asked: Asked, options: dict[str, Any]) -> Seen:
        self.texts = (self._engine.generate(asked.prompt, **options),)
        return ()

    _resume = _one

    def _chat(self, asked: Asked, options: dict[str, Any]) -> Seen:
        self.texts = (self._engine.chat([{"role": "user", "content": asked.prompt}], **options),)
        return ()

    def _parallel(self, asked: Asked, options: dict[str, Any]) -> Seen:
        def one(k: int) -> Generation:
            return self._engine.generate(asked.prompt + "b" * (k % 2), **{**options, "seed": options["seed"] + k})

        options.pop("futures", None)  # what they hold when a text begins depends on the others' time
        with ThreadPoolExecutor(asked.n) as pool:
            self.texts = tuple(pool.map(one, range(asked.n)))
        return ()

    def _samples(self, asked: Asked, options: dict[str, Any]) -> Seen:
        self.texts = self._engine.samples(asked.prompt, asked.n, **options)
        return ()

    def _until(self, asked: Asked, options: dict[str, Any]) -> Seen:
        calls: list[tuple[str, ...]] = []

        def enough(ended: Sequence[Generation]) -> bool:
            calls.append(tuple(text.text for text in ended))
            return len(ended) >= asked.n // 2

        self.texts = self._engine.samples(asked.prompt, asked.n, until=enough, **options)
        return (calls,)

    def _forks(self, asked: Asked, options: dict[str, Any]) -> Seen:
        """Fork text 0 behind some tokens; what the fork draws behind them is compared with plain decoding here.

        A text grows by whole steps, so with drafts it may have ended where it could be forked without.
        """
        stream, forked, n_read = self._engine.samples_stream(asked.prompt, 2, **options), -1, 0
        begun: tuple[int, ...] = ()
        for output in stream:
            n_read += output.text == 0
            if forked < 0 and n_read >= asked.at and 0 in stream.live:
                (forked,), begun = stream.fork(0), stream.generations[0].token_ids
        self.texts = stream.generations[:2]
        left = options["max_tokens"] - len(begun)
        if forked < 0 or options.get("stop") or left < 1:
            return ()
        prompt, seed = [*self._plain.prompt_ids(asked.prompt), *begun], options["seed"] + forked
        rest = self._plain.generate(prompt, **{**options, "seed": seed, "max_tokens": left})
        found, expected = stream.generations[forked].token_ids, begun + rest.token_ids
        return () if found == expected else (f"the fork has {found}, plain decoding {expected}",)

    def _best(self, asked: Asked, options: dict[str, Any]) -> Seen:
        how = BestOf(n=asked.n, choose=asked.choose, answer=r"[a-z1]+")
        found = best(self._engine, asked.prompt, how, **options)
        self.texts = found.texts
        return found.place, found.answers, found.scores, found.why

    def _search(self, asked: Asked, options: dict[str, Any]) -> Seen:
        found = best(self._engine, asked.prompt, SearchBy(asked.choose, n=asked.n), **options)
        self.texts = found.texts
        return found.place, found.answers, found.scores, found.why

    def _cancel(self, asked: Asked, options: dict[str, Any]) -> Seen:
        cancel = CancelToken()
        stream = self._engine.stream(asked.prompt, cancel=cancel, **options)
        for n_read, _ in enumerate(stream, 1):
            if n_read == asked.at:
                cancel.cancel()
        self.texts = (stream.generation,)
        return ()


def load_options(config: Config, files: Files) -> tuple[str | Path, dict[str, Any]]:
    """Return the model of a configuration and the options of its load with drafts."""
    model = models_dir() / f"{REAL}.gguf" if config.model == REAL else files.path(config.model)
    drafting = dict(config.drafting)
    for name in ("draft_model", "draft_head"):
        if name in drafting:
            drafting[name] = files.path(drafting[name])
    return model, {**config.load, **drafting, "n_threads": 1, "offline": True, "cache_dir": files.folder / "cache"}


def compared(number: int, config: Config, files: Files) -> Outcome:
    """Return what became of a configuration: each request is compared with plain decoding.

    Args:
        number: The number of the configuration.
        config: The configuration.
        files: The models.
    """
    outcome = Outcome(number)
    model, options = load_options(config, files)
    plainly = {name: value for name, value in options.items() if name not in config.drafting} | {"draft": "off"}
    try:
        with edgedec.load(model, **plainly) as plain, edgedec.load(model, **options) as drafting:
            askers = Asker(plain, plain), Asker(drafting, plain)
            begun: tuple[int, ...] = ()
            for i, asked in enumerate(config.requests):
                resumed = begun[: asked.at] if asked.kind == "resume" else ()
                if asked.kind == "resume":
                    whole = plain.generate(asked.prompt, **asked.request())
                    resumed = whole.token_ids[: asked.at]
                expected = askers[0].ask(asked, resumed, "")
                texts = askers[0].texts
                predicted = texts[0].text if asked.predicted and texts else ""
                found = askers[1].ask(asked, resumed, predicted)
                outcome.n_requests += 1
                outcome.n_texts += len(texts)
                outcome.n_tokens += sum(len(text.token_ids) for text in texts)
                if found != expected or CRASHED in (found[0], expected[0]):
                    outcome.different[i] = expected, found
            outcome.n_accepted = askers[1].n_accepted
    except EdgedecError as error:
        outcome.refused = f"{type(error).__name__}: {error}"
    return outcome


def config_of(number: int, seed: int) -> Config:
    """Return the configuration of a number."""
    return drawn(random.Random(f"{seed}:{number}"), real=has_real())


def has_real() -> bool:
    """Return whether the real model is on this machine; without it, other configurations are drawn."""
    return (models_dir() / f"{REAL}.gguf").exists()


def outcomes(numbers: Iterator[int], seed: int, folder: Path, workers: int) -> Generator[Outcome]:
    """Yield what becomes of configurations, as they end, in processes of their own; each has its own files."""
    if workers < 2:
        files = Files(folder)
        yield from (compared(number, config_of(number, seed), files) for number in numbers)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (folder,)) as pool:
        running = {pool.submit(_compared_there, next(numbers), seed) for _ in range(2 * workers)}
        try:
            while True:
                done = next(as_completed(running))
                running.remove(done)
                running.add(pool.submit(_compared_there, next(numbers), seed))
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


_FILES: list[Files] = []


def _begin_worker(parent: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    _FILES.append(Files(Path(tempfile.mkdtemp(dir=parent))))


def _compared_there(number: int, seed: int) -> Outcome:
    return compared(number, config_of(number, seed), _FILES[0])


def told(outcome: Outcome, seed: int) -> None:
    """Print a configuration that differs, and how to replay it."""
    config = config_of(outcome.number, seed)
    print(f"\nconfiguration {outcome.number} differs; replay: --seed {seed} --only {outcome.number}", file=sys.stderr)
    print(f"  {config.model} {config.load} {config.drafting}", file=sys.stderr)
    for i, (expected, found) in outcome.different.items():
        print(f"  request {i}: {config.requests[i]}", file=sys.stderr)
        for part, (one, other) in enumerate(zip(expected, found, strict=False)):
            if one != other or CRASHED in (expected[0], found[0]):
                print(f"    {part}: plain  {one!r:.2500}\n    {part}: drafts {other!r:.2500}", file=sys.stderr)
        if len(expected) != len(found):
            print(f"    plain  {expected!r:.600}\n    drafts {found!r:.600}", file=sys.stderr)


def run(n_requests: int, seed: int, workers: int, folder: Path, only: int | None = None) -> dict[str, Any]:
    """Return the counts of a run over at least so many requests, or over one configuration."""
    counts, different, begun = Counter[str](requests=0, different=0), list[int](), perf_counter()
    numbers = iter([only]) if only is not None else count()
    try:
        with closing(outcomes(numbers, seed, folder, 1 if only is not None else workers)) as found:
            for outcome in found:
                counts.update(configurations=1, requests=outcome.n_requests, texts=outcome.n_texts)
                counts.update(tokens=outcome.n_tokens, accepted=outcome.n_accepted, refused=bool(outcome.refused))
                counts.update(different=len(outcome.different))
                if outcome.different:
                    different.append(outcome.number)
                    told(outcome, seed)
                if only is not None and outcome.refused:
                    print(outcome.refused, file=sys.stderr)
                line = f"\r{counts['requests']} of {n_requests} requests, {counts['different']} differ"
                print(line, end="", file=sys.stderr, flush=True)
                if counts["requests"] >= n_requests:
                    break
    except KeyboardInterrupt:
        print("\nended early", file=sys.stderr)
    return dict(counts) | {"differing": different, "seconds": round(perf_counter() - begun, 1)}


def main() -> None:
    """Parse the command line, run, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the configurations (default: 0)")
    parser.add_argument("--only", type=int, help="replay the configuration of this number")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json-out", type=Path, help="write the line of JSON to this file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(args.requests, args.seed, args.workers, Path(folder), args.only)
    print(file=sys.stderr)
    report({"benchmark": "random_same_text", "seed": args.seed, "real_model": has_real()} | counts, args.json_out)
    sys.exit(bool(counts["different"]) or (args.only is None and counts["requests"] < args.requests))


if __name__ == "__main__":
    main()
