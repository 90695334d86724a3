"""Where keys and values lie: in huge pages, which go back to the system with the text."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_quantized import Tiny, write_tiny

import edgedec
from edgedec.model import Session

N_CTX = 1024
TINY = Tiny(n_layer=8, n_embd=256, n_head=4, n_head_kv=4, head_dim=64, n_ctx_train=N_CTX)
PAGE = 8 * 4 * 64 * 2 * 2 * 64  # bytes of 64 tokens
TEXT = np.arange(N_CTX, dtype=np.int32) % 50


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Return a session of a model whose keys and values take 8 MB."""
    path = write_tiny(tmp_path_factory.mktemp("m") / "m.gguf", TINY)
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=N_CTX, memory="1GB") as engine:
        session = engine.session()
        yield session
        session.close()


def held() -> int:
    """Return the bytes that a mapping holds which asks for huge pages and has room for just all keys and values."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [
        [1024 * int(kb) for kb in re.findall(r"^(?:Size|Rss): +(\d+)", part, flags=re.MULTILINE)]
        for part in parts
        if " hg" in part.rpartition("VmFlags:")[2]
    ]
    return sum(rss for size, rss in sizes if size == PAGE * N_CTX // 64)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for huge pages")
def test_keys_and_values_lie_in_huge_pages_and_go_back_with_the_text(session: Session) -> None:
    """A fork lets go of what is behind it; what is written there again has the bits of before."""
    before, n = held(), N_CTX - 8
    whole = session.forward(TEXT[:n], n_past=0).logits
    assert held() - before >= PAGE * n // 64
    session.forward(TEXT[127:128], n_past=127)
    twin = session.fork()
    assert held() - before <= 3 * PAGE + (2 << 20)
    for each in (session, twin):
        assert np.array_equal(each.forward(TEXT[128:n], n_past=128).logits, whole)
    twin.close()
