"""Measure the first token of a conversation's next turn against a cold start of the same prompt.

    python benchmarks/speed/conversation.py --model smollm2-135m --history 1500

The history is a chat of at least that many tokens. A warm turn reuses the KV cache, a cold one evaluates the whole
prompt; the two alternate. Ends with one line of JSON.
"""

import argparse
import json
from statistics import median

import edgedec

_TURNS = (
    ("user", "Tell me about the sea, the sky, the mountains and the rivers, at some length."),
    (
        "assistant",
        "The sea is wide and the sky is blue; mountains rise where rivers begin, and rivers end in the sea. " * 4,
    ),
)


def history(engine: edgedec.Engine, n_tokens: int) -> list[dict[str, str]]:
    """Return a chat of at least `n_tokens` tokens that ends with an answer."""
    messages: list[dict[str, str]] = []
    while not messages or len(engine.chat_ids(messages)) < n_tokens:
        messages += [{"role": role, "content": content} for role, content in _TURNS]
    return messages


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--history", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cold, warm, evaluated = [], [], 0
    with edgedec.load(args.model, n_ctx=4096) as engine:
        messages = history(engine, args.history)
        following = [*messages, {"role": "user", "content": "And the wind?"}]
        n_history = len(engine.chat_ids(messages))
        for _ in range(args.rounds):
            engine.generate([5], max_tokens=1)  # nothing of the chat is left in the cache
            first = engine.chat(following, max_tokens=1, temperature=0).stats
            engine.generate([5], max_tokens=1)
            engine.chat(messages, max_tokens=1, temperature=0)
            second = engine.chat(following, max_tokens=1, temperature=0).stats
            cold.append(first.first_token_s)
            warm.append(second.first_token_s)
            evaluated = second.n_prompt_tokens - second.n_reused_tokens
    ratio = median(w / c for w, c in zip(warm, cold, strict=True))
    print(f"history {n_history} tokens; cold {median(cold):.3f} s, next turn {median(warm):.3f} s, ratio {ratio:.3f}")
    print(f"the next turn evaluates {evaluated} tokens")
    figures = {"n_history": n_history, "cold_s": median(cold), "warm_s": median(warm), "ratio": ratio}
    print(json.dumps(figures | {"n_evaluated": evaluated}))


if __name__ == "__main__":
    main()
