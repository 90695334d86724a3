"""What --explain prints, and with --verbose: what was drafted, verified and accepted, whether it helped, and why."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from edgedec.errors import counted
from edgedec.stats import DecodeStats
from edgedec_apps.cli.shown.terminal import one_line

if TYPE_CHECKING:
    from edgedec.api.engine import Engine

Detail = Literal["none", "short", "all"]
"""How much is explained: nothing, a few lines that fit one screen, or all that is known."""

_COLUMNS = 80  # of the short form, which fits one screen
_ALWAYS_SHOWN = ("temperature", "top_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_last_n")
SAMPLED = (*_ALWAYS_SHOWN, "top_k", "min_p", "momentum", *_PENALTIES)
"""The options of sampling that change what is probable."""
_PLAIN = "as fast as without drafts"


def explained(stats: DecodeStats, detail: Detail, further: Sequence[str] = ()) -> list[str]:
    """Return the lines that explain a text, in as much detail; `further` are lines on what is not in its statistics."""
    if detail == "none":
        return []
    if detail == "all":
        return [*_explanation(stats), *further]
    return [row for line in (*_short_explanation(stats), *further) for row in _wrapped(line)]


def speed_compared(stats: DecodeStats) -> str | None:
    """Return how a text with drafts compares with plain decoding, such as "1.3 times as fast as without drafts".

    None where nothing was drafted, or no forward was timed.
    """
    if stats.speedup is None or not stats.n_drafts:
        return None
    shown = f"{stats.speedup:.1f}"
    return _PLAIN if shown == "1.0" else f"{shown} times {_PLAIN}"


def gain(stats: DecodeStats) -> str | None:
    """Return how many times as fast the drafts made a text, or None where they made it less than 1.05 times as fast."""
    return speed_compared(stats) if (stats.speedup or 0.0) >= 1.05 else None


def sampling_line(engine: "Engine", options: dict[str, Any]) -> str:
    """Return the sampling of a text, each value with where it comes from: an option, the model's file, or edgedec."""
    set_options = {name: value for name, value in options.items() if name in SAMPLED}
    effective, defaults = engine.requests.sampling(**set_options), engine.card.sampling_defaults
    values: dict[str, list[str]] = {}
    for name in SAMPLED:
        source = "options" if name in set_options else "the model's file" if name in defaults else "edgedec's defaults"
        if source != "edgedec's defaults" or name in _ALWAYS_SHOWN:
            values.setdefault(source, []).append(f"{name} {getattr(effective, name)}")
    return "sampling: " + "; ".join(f"{', '.join(shown)} ({source})" for source, shown in values.items())


def _short_explanation(stats: DecodeStats) -> list[str]:
    """Return a few lines for a person: what drafting did and whether it helped, times, and what the text cost."""
    lines = list[str]()
    if (speed := speed_compared(stats)) is not None:
        saved_s = ((stats.speedup or 1.0) - 1) * (stats.total_s - stats.first_token_s)
        lines.append(f"{speed}: about {abs(saved_s):.2f} s {'saved' if saved_s >= 0 else 'lost'} after the first token")
    if stats.n_drafts:
        each = stats.n_draft_tokens / stats.n_drafts
        lines.append(f"drafts: {each:.1f} tokens each, {stats.mean_accepted:.2f} of them accepted")
    tried = {name: (round(counts["right"]), round(counts["tried"])) for name, counts in stats.drafters.items()}
    right = ", ".join(f"{name} {right} of {n}" for name, (right, n) in tried.items() if n)
    if right:
        lines.append(f"right guesses: {right}")
    lines += stats.explanation[:1]  # how often drafting promised to pay; which of two models wrote
    return [*lines, *stats.reasons, _phases(stats), *filter(None, [stats.miss]), *_constraint(stats)]


def _explanation(stats: DecodeStats) -> list[str]:
    """Return all lines of the explanation: times, the cost of forwards, each drafter, the drafts, and the reasons."""
    lines = [_phases(stats)]
    if (speed := speed_compared(stats)) is not None:
        lines.append(f"speed after the first token: {speed} ({stats.speedup:.3f}), by the cost curve")
    if stats.curve:
        base = stats.curve.get(1)
        points = [f"{n}: {1000 * seconds:.1f} ms{_steps(seconds, base)}" for n, seconds in stats.curve.items()]
        lines.append(f"a forward of n tokens: {', '.join(points)}")
    for name, counts in stats.drafters.items():
        right, tried = counts["right"], counts["tried"]
        share = f"{right / tried:.0%} of the {tried:.0f} compared were right" if tried else "none compared"
        lines.append(
            f"{name}: {counted(round(counts['nodes']), 'token')} proposed in {counts['draft_s']:.3f} s, {share}"
        )
        if "ahead" in counts:
            ahead, used = counts["ahead"], counts["used"]
            lines.append(f"{name}: {counted(round(ahead), 'token')} drafted while the target verified, {used:.0f} used")
    if stats.n_drafts:
        lines.append(
            f"verified: {counted(stats.n_drafts, 'draft')} of {stats.n_draft_tokens / stats.n_drafts:.1f} tokens, "
            f"{stats.mean_accepted:.2f} accepted of each{_positions(stats)}"
        )
    lines += [*dict.fromkeys([*stats.explanation, *filter(None, [stats.miss]), *stats.reasons]), *_constraint(stats)]
    if stats.runtime_reason:
        lines.append(f"runtime {stats.runtime}: {stats.runtime_reason}")
    return [*lines, f"seed: {stats.seed}"]


def _wrapped(line: str) -> list[str]:
    """Return a line as rows of a narrow screen, less the two columns by which an explanation is indented."""
    columns = min(_COLUMNS, shutil.get_terminal_size().columns if sys.stderr.isatty() else _COLUMNS)
    return textwrap.wrap(one_line(line), max(columns, 20) - 2, subsequent_indent="  ", break_on_hyphens=False)


def _constraint(stats: DecodeStats) -> list[str]:
    if stats.constraint_logprob is None:
        return []
    return [f"constraint: log-probability of what it allowed {stats.constraint_logprob:.3f}, summed over the tokens"]


def _phases(stats: DecodeStats) -> str:
    phases = {"prefill": stats.prefill_s, "forwards": stats.forward_s, "verify": stats.verify_s, "draft": stats.draft_s}
    return "time: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())


def _positions(stats: DecodeStats) -> str:
    """Return how many tokens were accepted at the first, second, ... position of drafts; nothing without any."""
    counts = ", ".join(map(str, stats.accepted_by_position))
    return f"; at the positions from the first: {counts}" if counts else ""


def _steps(seconds: float, base: float | None) -> str:
    return f" ({seconds / base:.2f} steps)" if base and seconds != base else ""
