"""The tables of what boards hold, in the documents: those that `edgedec plan` makes of headers of the same sizes."""

import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.gguf_writer import Claims, RawTensor, build_gguf
from support.models.real_models import real_model
from support.models.tiny_models import vocabulary
from support.processes.command_line import run_here

from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.llamacpp.trial import repack_complaint

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("drafting"),
    pytest.mark.skipif(
        not (ROOT / "docs" / "which-model.md").is_file(), reason="the documents are not beside the tests"
    ),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the tables were made on x86-64"),
]


# Width, layers, width within, heads, heads of keys, tokens, context; types: embedding, output, down, values, others.
_SIZES = {
    "smollm2-135m": ("llama", 576, 30, 1536, 9, 3, 49152, 8192, ("Q8_0", "", "Q4_1", "Q4_1", "Q4_1")),
    "qwen2.5-coder-0.5b": ("qwen2", 896, 24, 4864, 14, 2, 151936, 32768, ("Q5_0", "Q8_0", "Q6_K", "Q8_0", "Q5_0")),
    "qwen2.5-coder-1.5b": ("qwen2", 1536, 28, 8960, 12, 2, 151936, 32768, ("Q4_K", "Q6_K", "Q6_K", "Q6_K", "Q4_K")),
}


def real_header(folder: Path, name: str) -> Path:
    """Write a stand-in of a model into a folder: its sizes, shapes and types, and a hole for the weights.

    Memory plans depend on nothing else.
    """
    family, n_embd, n_layer, n_ff, n_head, n_kv_head, n_vocab, n_ctx, types = _SIZES[name]
    embedding, output, down, values, others = types
    n_kv = n_embd // n_head * n_kv_head
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("output_norm.weight", "F32", (n_embd,))]
    tensors += [("token_embd.weight", embedding, (n_embd, n_vocab))]
    tensors += [("output.weight", output, (n_embd, n_vocab))] if output else []
    for i in range(n_layer):
        # llama.cpp gives more bits to an eighth of the layers at each end, and to every third one between.
        is_dear = i < n_layer // 8 or i >= 7 * n_layer // 8 or (i - n_layer // 8) % 3 == 2
        less = "Q4_K" if others.startswith("Q5") else others
        blk = f"blk.{i}"
        tensors += [(f"{blk}.{norm}_norm.weight", "F32", (n_embd,)) for norm in ("attn", "ffn")]
        tensors += [(f"{blk}.attn_{part}.weight", others, (n_embd, n_embd)) for part in ("q", "output")]
        tensors += [(f"{blk}.attn_k.weight", others, (n_embd, n_kv))]
        tensors += [(f"{blk}.attn_v.weight", values if is_dear else others, (n_embd, n_kv))]
        tensors += [(f"{blk}.ffn_{part}.weight", others, (n_embd, n_ff)) for part in ("gate", "up")]
        tensors += [(f"{blk}.ffn_down.weight", down if is_dear else less, (n_ff, n_embd))]
        if family == "qwen2":
            sizes = {"q": n_embd, "k": n_kv, "v": n_kv}
            tensors += [(f"{blk}.attn_{part}.bias", "F32", (size,)) for part, size in sizes.items()]
    offset, offsets, raw = 0, dict[str, int](), dict[str, RawTensor]()
    for tensor, kind, shape in tensors:
        offsets[tensor], raw[tensor] = offset, RawTensor(GGMLType[kind], shape, b"")
        n_bytes = math.prod(shape) // GGMLType[kind].block_size * GGMLType[kind].block_bytes
        offset += -(-n_bytes // 32) * 32
    metadata: dict[str, Any] = {
        "general.architecture": family,
        "general.file_type": 15,
        f"{family}.block_count": n_layer,
        f"{family}.context_length": n_ctx,
        f"{family}.embedding_length": n_embd,
        f"{family}.feed_forward_length": n_ff,
        f"{family}.attention.head_count": n_head,
        f"{family}.attention.head_count_kv": n_kv_head,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
        **vocabulary(n_vocab),
    }
    path = folder / f"{name}.gguf"
    data = build_gguf(metadata, raw, Claims(offsets=offsets)).data
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + offset)
    return path


@pytest.mark.parametrize("with_llamacpp", [False, True])
def test_the_tables_of_the_documents_are_those_of_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_llamacpp: bool
) -> None:
    """Every number of a page: what is free, planned and given up, by board, model and context."""
    if with_llamacpp:
        pytest.importorskip("llama_cpp")
        if repack_complaint() is not None:
            pytest.skip("the page is of a machine that runs llama.cpp's rearranged weights")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "memory"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 64 << 30}))  # the tests' may be full
    from board_plans import tables

    paths: dict[str, Path] = {}

    def plan(arguments: str) -> dict[str, Any]:
        words = arguments.split()
        for i, typed in enumerate(words):
            word = typed.removeprefix("model=")
            if with_llamacpp and word.startswith("qwen2.5"):  # as the page was made
                words[i] = typed.replace(word, str(real_model(f"{word}.gguf")))
            elif word.startswith(("smollm2", "qwen2.5")):
                words[i] = str(paths.setdefault(word, real_header(tmp_path, word) if word not in paths else tmp_path))
        result = run_here("plan", *words, "--runtime", "llamacpp" if with_llamacpp else "cpu", "--quiet", "--json")
        assert result.out, result
        found: dict[str, Any] = json.loads(result.out)
        return found

    for page, table in tables(plan, only_llamacpp=with_llamacpp):
        assert table in (ROOT / page).read_text(encoding="utf-8"), f"{page} differs:\n{table}"
    sys.modules.pop("board_plans")
