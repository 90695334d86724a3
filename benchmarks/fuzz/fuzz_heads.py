"""Damage draft heads at random: a head that drafts, or an EdgedecError, must come out, quickly and in little memory.

    python benchmarks/fuzz/fuzz_heads.py --seconds 60 --seed 1 --keep findings/

Folders (config.json, safetensors, the record) and GGUFs of EAGLE-3, block, row and exit heads, of a nextn layer and of
Gemma 4's assistants are damaged in turn, in their bytes, in what they say and in their tensors. Each mutant is loaded,
fitted to a tiny model, an assistant to a tiny gemma4, and drafts two tokens, or a block, with the numpy head, which
there is one of for EAGLE-3 and blocks; one that fits also drafts on the cpu runtime, behind a text of that model. A
finding is any other exception, a refusal of sizes or types by the native library alone, more than 1 s of processor
time, more than HANG_S in all, or more memory than LIMIT_BYTES above the start. Findings are kept as files. Where the
native code dies, the process does; the mutant is then in the folder that the first line of standard error names.
"""

import random
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fuzz_bases import Source
from fuzz_mutants import contradictory, damaged, other_data
from fuzz_runs import arguments, fuzz, here, let_grow
from support.heads.head_mutants import HeadFiles, mutant, sound_heads
from support.heads.reference_block import ReferenceBlock
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_assistant import FLOATS, OF_FLOATS, assistant
from support.heads.tiny_blocks import block_card, tiny_block
from support.heads.tiny_heads import TinyHead, head_weights
from support.heads.tiny_nextn import OWN, nextn_metadata, nextn_tensors
from support.heads.tiny_rows import exit_head, rows_head
from support.models.gguf_writer import Built, RawTensor, build_gguf
from support.models.tiny_models import N_VOCAB as TOKENS
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import SessionError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.head_state import Arranging, ChainRules
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import RowShape
from edgedec_runtimes.trained_heads.gguf_block import MASK_KEY, tensor_name
from edgedec_runtimes.trained_heads.gguf_eagle3 import TENSORS
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

LIMIT_S = 1.0
LIMIT_BYTES = 256 * 2**20
N_VOCAB = 264
_OF_MODEL = [[str(layer)] for layer in range(6)]


def gguf_heads() -> list[Source]:
    """Return sound heads as GGUFs' values and tensors."""
    rows = [Source(*rows_head(RowShape(3, layer), 32, N_VOCAB)) for layer in (0, 2)]
    heads = [_eagle3(), _dflash(), _nextn(), *rows, Source(*exit_head(2, 32, N_VOCAB))]
    return [*map(_raw, heads), Source(*assistant(OF_FLOATS, FLOATS.n_embd))]


def _raw(source: Source) -> Source:
    """Return a head whose tensors are bytes, as mutations of shapes and types take them."""
    types = {np.dtype(np.float32): GGMLType.F32, np.dtype(np.int64): GGMLType.I64}
    tensors = {name: RawTensor(types[t.dtype], t.shape[::-1], t.tobytes()) for name, t in source.tensors.items()}
    return Source(source.metadata, tensors)


def _nextn() -> Source:
    tiny = Tiny("llama", n_layer=6, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=64, tied=True)
    tensors = {
        name: tensor for name, tensor in nextn_tensors(tiny, OWN).items() if name.split(".")[1:2] not in _OF_MODEL
    }
    floats = {name: np.frombuffer(t.data, np.float32).reshape(t.shape[::-1]) for name, t in tensors.items()}
    for name in [name for name, values in floats.items() if len(values) == TOKENS]:
        floats[name] = np.pad(floats[name], ((0, N_VOCAB - TOKENS), (0, 0)))
    return Source(nextn_metadata(tiny), floats)


def _dflash() -> Source:
    shape = {"n_layer": 2, "markov": "vanilla", "rank": 6, "confidence": True, "mask_token": 3}
    head = tiny_block(block_card(shape, n_head=2, n_head_kv=1, head_dim=16, own_output=True))
    metadata = {
        "general.architecture": "dflash",
        "general.name": "tiny",
        "dflash.block_count": 2,
        "dflash.context_length": 64,
        "dflash.embedding_length": 32,
        "dflash.feed_forward_length": 64,
        "dflash.attention.head_count": 2,
        "dflash.attention.head_count_kv": 1,
        "dflash.attention.key_length": 16,
        "dflash.attention.value_length": 16,
        "dflash.attention.layer_norm_rms_epsilon": 1e-5,
        "dflash.attention.causal": True,
        "dflash.attention.sliding_window": 8,
        "dflash.attention.sliding_window_pattern": [True, False],
        "dflash.attention.scale": 0.25,
        "dflash.attention.value_scale": 1.0,
        "dflash.block_size": 5,
        "dflash.sample_from_anchor": True,
        "dflash.has_confidence_head": True,
        "dflash.rope.freq_base": 5000.0,
        "dflash.rope.dimension_sections": [8, 0, 0, 0],
        "dflash.rope.scaling.type": "linear",
        "dflash.rope.scaling.factor": 2.0,
        "dflash.embedding_scale": 2.0,
        "dflash.logit_scale": 0.5,
        "dflash.final_logit_softcapping": 30.0,
        "dflash.hidden_act": "silu",
        "dflash.vocab_size": N_VOCAB,
        "dflash.target_layers": [2, 3, 5],
        MASK_KEY: 3,
        "edgedec.head": '{"name": "h", "reach": [0.5, 0.25], "target": {"name": "t"}}',
    }
    tensors = {tensor_name(name): tensor.floats() for name, tensor in head.tensors.items()}
    return Source(metadata, tensors | {"d2t": head.d2t.astype(np.int64)})


def _eagle3() -> Source:
    weights = head_weights(TinyHead(own_output=True, fc_norm="joined", n_head=2, n_head_kv=1, head_dim=16))
    metadata = {
        "general.architecture": "eagle3",
        "general.name": "tiny",
        "eagle3.block_count": 1,
        "eagle3.context_length": 64,
        "eagle3.embedding_length": 32,
        "eagle3.feed_forward_length": 64,
        "eagle3.attention.head_count": 2,
        "eagle3.attention.head_count_kv": 1,
        "eagle3.attention.key_length": 16,
        "eagle3.attention.value_length": 16,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-5,
        "eagle3.rope.freq_base": 5000.0,
        "eagle3.rope.dimension_count": 16,
        "eagle3.rope.scaling.type": "linear",
        "eagle3.rope.scaling.factor": 2.0,
        "eagle3.vocab_size": N_VOCAB,
        "eagle3.target_layers": [2, 3, 5],
        "eagle3.target_hidden_size": 32,
        "eagle3.norm_before_residual": True,
        "eagle3.norm_before_fc": True,
        "edgedec.head": '{"name": "h", "reach": [0.5, 0.25], "target": {"name": "t"}}',
    }
    tensors = {TENSORS[name]: values for name, values in weights.items() if name != "d2t"}
    return Source(metadata, tensors | {"d2t": weights["d2t"].astype(np.int64)})


def exercise(path: Path, targets: tuple[GGUF, GGUF]) -> str:
    """Load a head, fit it to a llama or a gemma4, and draft, as a first command does; return whether it fits the model.

    A refusal by the native library is an error, unless of scores that are not finite, which it alone sees.
    """
    head, fits = load_head(path), True
    target = targets[head.card.reads_target]
    try:
        head = fit(head, target).head
        draft_natively(path, target)
    except SessionError as error:
        if "not finite" in str(error):
            raise
        raise AssertionError("the native library refused it alone") from error
    except UnsupportedModelError:
        fits = False  # a sound head for another model drafts all the same, below
    plain = () if head.card.joins or head.card.splits_forwards else draft_plainly(head)
    assert all(0 <= token < head.card.n_vocab_target for token in plain)
    return "native" if fits else "ok"


def draft_plainly(head: Head) -> Sequence[int]:
    """Return what the numpy head drafts behind three tokens, with embeddings and an output matrix of ones."""
    card, taps = head.card, np.ones((3, head.tensors["fc"].shape[1]), np.float32)
    embedding = np.ones((1, card.n_embd), np.float32)
    output = np.ones((card.n_vocab_draft, card.n_embd), np.float32)
    if card.block is not None:
        block = ReferenceBlock(head, lambda tokens: embedding.repeat(len(tokens), 0), output)
        block.absorb(taps)
        return block.draft(4, card.block.n_drafts).tokens
    reference = ReferenceHead(head, lambda tokens: embedding.repeat(len(tokens), 0), output)
    reference.absorb(taps)
    return reference.draft([1, 2, 3, 4], 2)[0]


def draft_natively(path: Path, target: GGUF) -> None:
    """Draft with a head that fits, on the cpu runtime."""
    options = LoadOptions(n_ctx=32, max_rows=2, n_threads=1, draft_head=path)
    with Cpu().load(target.paths[0], options) as model:
        session = model.session(32)
        head = session.draft_head
        if isinstance(head, Arranging):
            head.arrange(None)
        session.forward(np.arange(8, dtype=np.int32), n_past=0)
        if head is not None:
            session.forward(np.array([8, *head.chain(8, 8, ChainRules(3)).tokens], np.int32), n_past=8, rows="all")


def write_mutant(
    folder: Path, heads: Sequence[HeadFiles], ggufs: Sequence[tuple[Source, Built]], rng: random.Random
) -> Path:
    """Write a damaged head and return its path: half of them folders, half of them GGUFs."""
    if rng.random() < 0.5:
        mutant(rng, heads).write(folder)
        return folder
    path, (source, built) = folder.with_suffix(".gguf"), rng.choice(ggufs)
    what = rng.randrange(5)
    if what < 2:
        path.write_bytes(damaged(source, built, rng))
    else:
        path.write_bytes((other_data if what == 2 else contradictory)(source, rng))
    return path


def main() -> int:
    """Try folders and GGUFs of heads in this process."""
    options = arguments(__doc__)
    warnings.simplefilter("ignore", RuntimeWarning)  # damaged weights overflow
    exercise_once = np.ones((64, 64), np.float32)
    exercise_once @ exercise_once  # numpy's library takes its threads' memory before the limit is set
    rng, heads = random.Random(options.seed), sound_heads()
    ggufs = [(source, build_gguf(source.metadata, source.tensors)) for source in gguf_heads()]
    let_grow(LIMIT_BYTES)
    with tempfile.TemporaryDirectory() as name:
        print(f"mutants are written to {name}", file=sys.stderr)
        folder = Path(name)
        llama = tiny_llama(folder / "t.gguf", n_embd=32, n_head=2, n_head_kv=1, n_layer=6, n_vocab=N_VOCAB)
        targets = read_gguf(llama), read_gguf(write_tiny(folder / "g.gguf", FLOATS))
        return fuzz(
            options,
            lambda number: write_mutant(folder / "head", heads, ggufs, rng),
            lambda path, number: here(lambda: exercise(path, targets), LIMIT_S),
        )


if __name__ == "__main__":
    sys.exit(main())
