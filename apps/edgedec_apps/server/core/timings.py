"""Reports in a reply: times and counts (`timings`, with llama.cpp's names), and why the model drafted or not."""

from collections.abc import Sequence
from typing import Any

from edgedec.sequence import Generation
from edgedec.stats import DecodeStats


def timings(generations: Sequence[Generation]) -> dict[str, Any]:
    """Return counts and milliseconds, summed over the texts of a reply.

    prompt_n counts the prompt tokens that were evaluated, cache_n those found in the KV cache; draft_n counts the
    tokens of verified drafts, draft_n_accepted the accepted ones. No time includes the wait in the queue.
    """
    stats = [generation.stats for generation in generations]
    n_prompt = sum(each.n_prompt_tokens - each.n_reused_tokens for each in stats)
    n_predicted = sum(each.n_generated_tokens for each in stats)
    prompt_s = sum(each.prefill_s for each in stats)
    predicted_s = sum(decoding_s(each) for each in stats)
    return {
        "cache_n": sum(each.n_reused_tokens for each in stats),
        "prompt_n": n_prompt,
        "prompt_ms": 1000 * prompt_s,
        "prompt_per_second": n_prompt / prompt_s if prompt_s else 0.0,
        "predicted_n": n_predicted,
        "predicted_ms": 1000 * predicted_s,
        "predicted_per_second": (n_predicted - len(stats)) / predicted_s if n_predicted > len(stats) else 0.0,
        "draft_n": sum(each.n_draft_tokens for each in stats),
        "draft_n_accepted": sum(each.n_accepted_tokens for each in stats),
    }


def decoding_s(stats: DecodeStats) -> float:
    """Return the seconds after the first token."""
    return max(0.0, stats.total_s - stats.first_token_s) if stats.first_token_s else 0.0


def finish_reason(generation: Generation) -> str:
    """Return why a text ended, in the words of OpenAI and ollama: to them a model that was unsure has stopped."""
    return "stop" if generation.finish_reason == "unsure" else generation.finish_reason


def explanations(generations: Sequence[Generation], queued_s: float) -> dict[str, Any]:
    """Return the `edgedec` field: for each text its seed, what was drafted and why, and the time of each phase."""
    return {"queue_ms": 1000 * queued_s, "generations": [_explained(generation) for generation in generations]}


def _explained(generation: Generation) -> dict[str, Any]:
    stats = generation.stats
    return {
        "runtime": stats.runtime,
        "seed": stats.seed,
        "finish_reason": generation.finish_reason,
        "chance_right": stats.chance_right,
        "constraint_logprob": stats.constraint_logprob,
        "n_drafts": stats.n_drafts,
        "accepted_by_position": stats.accepted_by_position,
        "drafters": stats.drafters,
        "phases_ms": {
            "prefill": 1000 * stats.prefill_s,
            "forward": 1000 * stats.forward_s,
            "verify": 1000 * stats.verify_s,
            "draft": 1000 * stats.draft_s,
        },
        "explanation": stats.explanation,
        "reasons": stats.reasons,
    }
