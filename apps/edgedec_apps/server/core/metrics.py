"""Counters of the server in Prometheus' text format, version 0.0.4."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from edgedec.memory.system import held_bytes, peak_held_bytes
from edgedec.sequence import Generation

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_DRAFTER_COUNTS = {
    "nodes": ("drafter_proposed_tokens_total", "Tokens that a drafter proposed."),
    "tried": ("drafter_judged_tokens_total", "Of these, tokens that could be compared with the text."),
    "right": ("drafter_accepted_tokens_total", "Of these, tokens that the text has."),
    "draft_s": ("drafter_seconds_total", "Seconds that a drafter took."),
    "late": ("drafter_late_total", "Drafts that came after their deadline."),
    "failed": ("drafter_failures_total", "Failures of a drafter."),
}
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Histogram:
    """Counts of observations up to each bound, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count an observation."""
        place = next((i for i, bound in enumerate(_BOUNDS_S) if seconds <= bound), len(_BOUNDS_S))
        self.counts[place] += 1
        self.sum_s += seconds


@dataclass(frozen=True, slots=True)
class Gauge:
    """A current value with its name and help; it is left out where the value is None."""

    name: str
    help: str
    value: float | None


class Metrics:
    """The counters of the server; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._help: dict[str, str] = {}
        self._queue, self._first_token = Histogram(), Histogram()

    def count_request(self, path: str, status: int) -> None:
        """Count an answered request."""
        with self._lock:
            self._add("requests_total", "Answered requests.", 1, path=path, status=str(status))

    def count_waiting(self, seconds: float) -> None:
        """Count a request that left the queue after some seconds."""
        with self._lock:
            self._queue.observe(seconds)
            self._add("phase_seconds_total", "Time by phase.", seconds, phase="queue")

    def count_generation(self, generation: Generation) -> None:
        """Count a text."""
        stats = generation.stats
        with self._lock:
            if stats.first_token_s:
                self._first_token.observe(stats.first_token_s)
            self._add("generations_total", "Texts by how they ended.", 1, finish_reason=generation.finish_reason)
            self._add("prompt_tokens_total", "Tokens of prompts.", stats.n_prompt_tokens)
            self._add("reused_tokens_total", "Of these, found in the KV cache.", stats.n_reused_tokens)
            self._add("generated_tokens_total", "Tokens generated.", stats.n_generated_tokens)
            self._add("forwards_total", "Forwards after the prefill.", stats.n_steps)
            self._add("drafts_total", "Drafts verified.", stats.n_drafts)
            self._add("draft_tokens_total", "Tokens of verified drafts.", stats.n_draft_tokens)
            self._add("accepted_tokens_total", "Of these, accepted.", stats.n_accepted_tokens)
            for phase in ("prefill", "forward", "verify", "draft"):
                self._add("phase_seconds_total", "Time by phase.", getattr(stats, f"{phase}_s"), phase=phase)
            for drafter, counts in stats.drafters.items():
                for key, (name, text) in _DRAFTER_COUNTS.items():
                    self._add(name, text, counts[key], drafter=drafter)

    def text(self, gauges: Iterable[Gauge]) -> str:
        """Return all counters and the gauges."""
        with self._lock:
            lines = list(self._lines())
        for gauge in gauges:
            if gauge.value is not None:
                lines += _head(gauge.name, gauge.help, "gauge")
                lines.append(f"edgedec_{gauge.name} {gauge.value:.12g}")
        return "\n".join(lines) + "\n"

    def _add(self, name: str, text: str, value: float, **labels: str) -> None:
        self._help[name] = text
        self._counters[name][tuple(labels.items())] += value

    def _lines(self) -> Iterator[str]:
        for name, values in self._counters.items():
            yield from _head(name, self._help[name], "counter")
            for labels, value in values.items():
                yield f"edgedec_{name}{_labels(labels)} {value:.12g}"
        yield from _histogram("queue_seconds", "Time that a request waited.", self._queue)
        yield from _histogram("first_token_seconds", "Time from then to the first token.", self._first_token)


def memory_gauges(processes: Sequence[int]) -> list[Gauge]:
    """Return the gauges of the memory of this process and of further ones that belong to its models."""
    return [
        Gauge("resident_bytes", "Memory that the process holds.", held_bytes(processes)),
        Gauge("peak_resident_bytes", "Most memory that the process has held.", peak_held_bytes(processes)),
    ]


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP edgedec_{name} {text}", f"# TYPE edgedec_{name} {kind}"]


def _labels(labels: Labels) -> str:
    """Return labels in the text format.

    >>> _labels((("path", 'a"b'),))
    '{path="a\\\\"b"}'
    """
    shown = [f'{name}="{_escaped(value)}"' for name, value in labels]
    return "{" + ",".join(shown) + "}" if shown else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, text, "histogram")
    total = 0
    for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        yield f'edgedec_{name}_bucket{{le="{bound}"}} {total}'
    yield f"edgedec_{name}_sum {histogram.sum_s:.12g}"
    yield f"edgedec_{name}_count {total}"
