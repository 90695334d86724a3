"""What grammars take: within the plan for a whole process, and for the one that compiles and follows them."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.models.real_models import real_model
from support.processes.command_line import PATIENCE_S, finish, start
from support.texts.large_grammars import LARGE, NASTY, followed, forget_peak, measured

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.grammar import LEAST_GRAMMAR_BYTES, Grammar
from edgedec.memory.system import resident_bytes
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.grammar.compiler import Llguidance
from edgedec_runtimes.tokenizer import open_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]

MB = 1_000_000
N_MB = 185


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(read_gguf(real_model("smollm2-135m.gguf")))


@pytest.mark.parametrize("name", LARGE)
def test_a_large_grammar_stays_within_what_it_may_take(name: str) -> None:
    """Compiled and followed it takes at most twice the bytes given, or is refused by name with what to do."""
    taken, refused = measured(name, real_model("smollm2-135m.gguf"))
    if refused:
        assert "or allow more memory: of it, 6.0 MB are for a grammar" in refused
        assert re.search("the (regular expression '|grammar|JSON schema)", refused), refused
    assert taken <= 2 * LEAST_GRAMMAR_BYTES


def test_what_a_matcher_has_met_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    """A matcher that is replaced for its size gives the masks of one that has room, token for token."""
    grammar = Grammar.regex(r"(\w{1,100} ){1,100}")
    small, large = (Llguidance(tokenizer, n).compile(grammar) for n in (LEAST_GRAMMAR_BYTES, 64 * MB))
    drawn, n_replaced, matched = np.random.default_rng(1), 0, None
    for _ in range(60):
        allowed = small.allowed()
        assert np.array_equal(allowed, large.allowed())
        n_replaced += small._matched is not matched
        matched = small._matched
        ids = np.flatnonzero(allowed)
        token = int(ids[int(drawn.integers(len(ids)))])
        if tokenizer.is_end(token):
            break
        assert small.advance(token)
        assert large.advance(token)
    assert n_replaced > 1


def test_what_a_text_took_goes_back(tokenizer: Tokenizer) -> None:
    """Grammars that were followed, one after the other, leave no more than the remembered few behind."""
    compiler = Llguidance(tokenizer, 64 * MB)
    compiler.compile(Grammar.regex("a+")).allowed()
    held = forget_peak()
    for i in range(12):
        state = compiler.compile(Grammar.regex(f"(a{{1,300}}|b{{1,300}}|{i}){{1,300}}.*a.{{{300 + i}}}"))
        followed(state, tokenizer, 30)
        state.close()
    assert (resident_bytes() or 0) - held <= 64 * MB // 5


def test_what_one_text_met_ends_no_other(tokenizer: Tokenizer) -> None:
    """Texts of one grammar share what was found out about it; that one met a limit is nothing to the next."""
    compiler = Llguidance(tokenizer, 64 * MB)
    reached = []
    for seed in range(4):
        state = compiler.compile(Grammar.regex(".*a.{500}"))
        reached.append(followed(state, tokenizer, 40, seed))
        state.close()
    assert reached == [40] * 4


def test_a_run_keeps_to_its_cap(smollm_path: Path, tmp_path: Path) -> None:
    """The plan has terms for grammars; an expression that grows without end is refused before the cap is met."""
    code = (
        "import sys; from edgedec.memory.system import peak_resident_bytes; from edgedec_apps.cli import main\n"
        "try: main()\n"
        "finally: print(peak_resident_bytes(), file=sys.stderr)"
    )
    flags = ["--runtime", "cpu", "--memory", f"{N_MB}MB", "-c", "512", "-n", "300", "-t", "1", "--seed", "3", "-q"]
    asked = ["run", str(smollm_path), "Write a and b.", "--grammar", f"regex:{NASTY}", "--offline", *flags]
    env = os.environ | {"EDGEDEC_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        command = [sys.executable, "-c", code, *asked]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False)
        assert done.returncode == 40, done.stderr
        said, peak = done.stderr.splitlines()
        assert NASTY[:30] in said
        assert "allow more memory" in said
        assert int(peak) <= N_MB * MB


def test_a_server_keeps_to_its_cap(smollm_path: Path) -> None:
    """A dozen requests with such expressions, one at a time and then four, leave a server within its cap."""
    n_mb = 260
    options = ("--memory", f"{n_mb}MB", "-c", "1024", "--parallel", "4", "--port", "0", "--runtime", "cpu", "--offline")
    with ExitStack() as stack:
        child = start("serve", smollm_path, *options)
        stack.callback(finish, child)
        stack.callback(child.send_signal, signal.SIGTERM)
        assert child.stderr is not None
        lines: list[str] = []
        while not any("is ready at" in line for line in lines):
            lines.append(child.stderr.readline().decode())
            assert lines[-1], lines
        url = re.search(r"http://\S+", lines[-1])
        assert url is not None
        client = stack.enter_context(httpx.Client(base_url=url[0], timeout=PATIENCE_S))

        def ask(i: int) -> int:
            pattern = f"((a{{1,{300 - i}}}|b{{1,300}}){{1,300}}){{1,300}}"
            fields: dict[str, Any] = {"prompt": "Write a and b.", "max_tokens": 100, "seed": i, "temperature": 1}
            asked = fields | {"response_format": {"type": "regex", "pattern": pattern}}
            reply = client.post("/v1/completions", json=asked)
            assert reply.status_code == 200 or "allow more memory" in reply.text, reply.text
            return reply.status_code

        for i in range(4):
            ask(i)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4, 12)))
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
        status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) * 1024 <= n_mb * MB


def test_a_plan_says_what_grammars_take(smollm_path: Path) -> None:
    """A load with a cap and grammars has the terms of both; the smaller limits come before slower decoding."""
    with edgedec.load(smollm_path, runtime="cpu", n_ctx=512, memory="190MB", grammars=True, offline=True) as engine:
        terms = {term.name: term.n_bytes for term in engine.plan.terms}
        assert terms["grammars"] in (12 * MB, 32 * MB)
        assert terms["vocabulary of grammars"] == 175 * engine.tokenizer.n_vocab
        assert any(what.startswith("grammars of at most") for what in engine.plan.given_up)
        assert engine.generate("x", grammar=Grammar.regex("yes|no"), temperature=0).text in ("yes", "no")
