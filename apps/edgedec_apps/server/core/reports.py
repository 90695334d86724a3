"""Reports in a reply: times and counts with llama.cpp's names, why the model drafted or not, log-probabilities."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edgedec.sequence import Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec.tokenizer import Tokenizer
from edgedec_apps.server.core.generation import Reading


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


def _explained(generation: Generation) -> dict[str, Any]:
    """Return a text's seed, what was drafted for it and why, and the time of each phase."""
    stats = generation.stats
    return {
        "runtime": stats.runtime,
        "seed": stats.seed,
        "finish_reason": generation.finish_reason,
        "chance_right": stats.chance_right,
        "constraint_logprob": stats.constraint_logprob,
        "speedup": stats.speedup,
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
        "reasons": [*stats.notes, *stats.reasons],
    }


def chat_entries(outputs: Iterable[TokenOutput], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return an entry for each token of the text, as in the `logprobs.content` of a chat."""
    return [
        _entry(output.token_id, output.logprob, tokenizer)
        | {"top_logprobs": [_entry(token_id, p, tokenizer) for token_id, p in output.top_logprobs.items()]}
        for output in _of_text(outputs, tokenizer)
    ]


def completion_logprobs(outputs: Iterable[TokenOutput], tokenizer: Tokenizer, offset: int) -> dict[str, Any] | None:
    """Return the four lists of /v1/completions for a text after `offset` characters; None where there is no token."""
    lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for output in _of_text(outputs, tokenizer):
        text = _token_text(output.token_id, tokenizer)
        lists["tokens"].append(text)
        lists["token_logprobs"].append(output.logprob)
        lists["top_logprobs"].append(
            {_token_text(token_id, tokenizer): logprob for token_id, logprob in output.top_logprobs.items()}
        )
        lists["text_offset"].append(offset)
        offset += len(text)
    return lists if lists["tokens"] else None


def _of_text(outputs: Iterable[TokenOutput], tokenizer: Tokenizer) -> Iterator[TokenOutput]:
    """Return the outputs that are tokens of the text, not end tokens or text that was held back."""
    return (output for output in outputs if output.logprob is not None and not tokenizer.is_end(output.token_id))


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text; U+FFFD stands for bytes of a character that spans tokens."""
    return tokenizer.piece(token_id).decode("utf-8", "replace")


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": _token_text(token_id, tokenizer), "logprob": logprob, "bytes": list(tokenizer.piece(token_id))}


def report(generations: Sequence[Generation], queued_s: float) -> dict[str, Any]:
    """Return the times of texts, and what was drafted and why."""
    explained = {"queue_ms": 1000 * queued_s, "generations": list(map(_explained, generations))}
    return {"timings": timings(generations), "edgedec": explained}


def usage(generations: Sequence[Generation], n: int) -> dict[str, Any]:
    """Return OpenAI's token counts; a prompt counts once for its `n` texts."""
    n_prompt = sum(generation.stats.n_prompt_tokens for generation in generations[::n])
    n_text = sum(generation.stats.n_generated_tokens for generation in generations)
    n_cached = sum(generation.stats.n_reused_tokens for generation in generations[::n])
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_text,
        "total_tokens": n_prompt + n_text,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def prompt_progress(reading: Reading) -> dict[str, Any]:
    """Return llama-server's field on how far a prompt is read, and our own one on how long the rest will take."""
    counts = {"total": reading.n_prompt, "cache": reading.n_reused, "processed": reading.n_read}
    left = {} if reading.left_s is None else {"edgedec": {"prompt_left_ms": round(1000 * reading.left_s)}}
    return {"prompt_progress": counts | {"time_ms": round(1000 * reading.seconds)}} | left
