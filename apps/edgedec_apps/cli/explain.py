"""The explanation that --explain prints: what was drafted, verified and accepted, and why."""

from edgedec.counted import counted
from edgedec.stats import DecodeStats


def explanation(stats: DecodeStats) -> list[str]:
    """Return the lines of the explanation: times, the cost of forwards, each drafter, the drafts, and the reasons."""
    lines = [stats.lossy, _phases(stats)] if stats.lossy else [_phases(stats)]
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
    lines += stats.explanation
    if (logprob := stats.constraint_logprob) is not None:
        lines.append(f"constraint: log-probability of what it allowed {logprob:.3f}, summed over the tokens")
    if stats.runtime_reason:
        lines.append(f"runtime {stats.runtime}: {stats.runtime_reason}")
    return lines


def _phases(stats: DecodeStats) -> str:
    phases = {"prefill": stats.prefill_s, "forwards": stats.forward_s, "verify": stats.verify_s, "draft": stats.draft_s}
    return "time: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())


def _positions(stats: DecodeStats) -> str:
    """Return how many tokens were accepted at the first, second, ... position of drafts; nothing without any."""
    counts = ", ".join(map(str, stats.accepted_by_position))
    return f"; at the positions from the first: {counts}" if counts else ""


def _steps(seconds: float, base: float | None) -> str:
    return f" ({seconds / base:.2f} steps)" if base and seconds != base else ""
