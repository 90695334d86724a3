"""A chat at the terminal: python chat.py [MODEL]. Ctrl-D ends it."""

import sys
from typing import Any

import edgedec


def main(name: str = "smollm2-135m") -> None:
    """Answer each line that is typed; the oldest turns are left out when the context is full."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly."}]
    with edgedec.load(name) as model:
        n_most = min(512, model.n_ctx // 2)
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                return
            newest, _ = model.fit_messages(messages, n_most)
            answer = ""
            for token in model.chat_stream(newest, max_tokens=n_most):
                print(token.text, end="", flush=True)
                answer += token.text
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
