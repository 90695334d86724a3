"""A real model behind the server, with its drafters."""

from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import run_here
from support.processes.running_server import messages, started

pytestmark = [pytest.mark.slow, pytest.mark.model]


def test_the_same_text_as_the_command_lines(smollm_path: Path) -> None:
    """The 135M model with drafts gives over HTTP, greedy and seeded, what `edgedec run` gives without."""
    prompt, n = "Write the numbers from one to ten as words, twice.", 24
    texts: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 11, "temperature": 0.8, "top_p": 0.9}]
    with started(smollm_path, load_options={"draft": "auto", "n_ctx": 1024}) as running:
        assert running.loaded == ["smollm2-135m"]
        for options in texts:
            asked = {"model": "smollm2-135m", "messages": messages(prompt), "max_tokens": n} | options
            reply = running.client.post("/v1/chat/completions", json=asked).json()
            flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
            flags += ["-n", str(n), "-c", "1024", "--runtime", "cpu", "--draft", "off", "-q"]
            run = run_here("run", smollm_path, prompt, *flags)
            assert reply["choices"][0]["message"]["content"] == run.text.removesuffix("\n")
            assert reply["timings"]["predicted_n"] > 0
