"""Damaged draft heads: their config.json, their record, their safetensors, or a GGUF of them, changed at random."""

import json
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgedec_runtimes.trained_heads.card import HeadCard, Promise, Target
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text
from support.heads.tiny_blocks import Dialect, block_card, block_config, stored_block, tiny_block
from support.heads.tiny_heads import TinyHead, head_config, head_weights, stored_tensors
from support.models.hf_checkpoints import safetensors_bytes

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 64, 2**24, 2**31, 2**63, 10**30, 0.5, -0.5, 1e-300, 1e300),
    *("", "llama", "eagle3", "silu", "linear", "llama3", "\udc80", "x" * 1000),
    *([], [1, 2, 3], [2, 3, 5], [0], [2**31, 1, 2], ["2"], [[1]], [1.0, 2.0], {}, {"factor": 0}, {"rope_type": "yarn"}),
    *({"rope_type": "linear", "factor": 1e-320}, {"eagle_aux_hidden_state_layer_ids": [1]}, {"norm_before_fc": True}),
    *("vanilla", "rnn", "DFlashDraftModel", ["sliding_attention"], {"target_layer_ids": [3, 1]}, {"block_size": 2**20}),
]
KEYS = (
    *("hidden_size", "head_dim", "rope_scaling", "rope_parameters", "norm_output", "fc_norm", "layer_types", "unknown"),
    *("eagle_config", "speculators_config", "transformer_layer_config", "num_aux_hidden_states", "vocab_size"),
    *("dflash_config", "sample_from_anchor", "use_sliding_window", "sliding_window", "is_causal", "mask_token_id"),
)
_BASE = TinyHead(n_head=2, n_head_kv=1, head_dim=16)
_SIZES: dict[str, Any] = {"n_head": 2, "n_head_kv": 1, "head_dim": 16}
_VANILLA = {"markov": "vanilla", "rank": 6, "confidence": True}
PAIRS = (
    _BASE,
    replace(_BASE, speculators=True, fc_norm="joined", feeds_back_normed=True),
    replace(_BASE, fc_norm="each", own_output=True, norms_output=False),
    replace(_BASE, own_embedding=True, own_output=True, norm_before_residual=True),
)
"""EAGLE-3 heads, of which mutants are made."""
BLOCKS: tuple[tuple[HeadCard, Dialect], ...] = (
    (block_card({"n_layer": 2} | _VANILLA, **_SIZES), "deepspec"),
    (block_card({"markov": "gated", "rank": 6, "mask_token": 3}, **_SIZES, own_output=True), "speculators"),
    (block_card({"markov": "rnn", "rank": 6, "causal": True}, **_SIZES), "specforge"),
    (block_card({"shifted": False, "windows": (7,), "mask_token": 3}, **_SIZES), "z-lab"),
)
"""Block heads, of which mutants are made, and the dialects that they are written in."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The files of a head's folder, by name."""

    files: dict[str, bytes]

    def write(self, folder: Path) -> None:
        """Make the folder hold these files and no others."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def sound_heads() -> list[HeadFiles]:
    """Return heads of PAIRS and BLOCKS, each with a record."""
    pairs = [_sound(head_config(tiny), stored_tensors(tiny, head_weights(tiny))) for tiny in PAIRS]
    return pairs + [_sound(block_config(card, dialect), stored_block(tiny_block(card))) for card, dialect in BLOCKS]


def _sound(config: dict[str, Any], stored: dict[str, Any]) -> HeadFiles:
    record = record_text("h", Target("t"), Promise((0.5, 0.2), {"chat": (0.4,)}))
    weights = safetensors_bytes(stored)
    return HeadFiles(
        {"config.json": json.dumps(config).encode(), RECORD_FILE: record.encode(), "model.safetensors": weights}
    )


def mutant(rng: random.Random, heads: Sequence[HeadFiles]) -> HeadFiles:
    """Return a damaged head's folder; the head is one of sound_heads()."""
    sound = rng.choice(heads)
    name = rng.choice(sorted(sound.files))
    data = sound.files[name]
    if rng.random() < 0.3:
        damaged = _other_bytes(data, rng)
    elif name == "model.safetensors":
        damaged = _other_header(data, rng)
    else:
        damaged = json.dumps(_other_values(json.loads(data), rng)).encode("utf-8", "surrogatepass")
    return HeadFiles(sound.files | {name: damaged})


def _other_values(found: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return an object in which one to three values, here or deeper, are others, gone or new."""
    changed = dict(found)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*changed, rng.choice(KEYS)])
        value = changed.get(key)
        if isinstance(value, dict) and value and rng.random() < 0.7:
            changed[key] = _other_values(value, rng)
        elif rng.random() < 0.15:
            changed.pop(key, None)
        else:
            changed[key] = rng.choice(VALUES)
    return changed


def _other_header(data: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file whose header says other names, dtypes, shapes or places; the data stay."""
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(names)
        if name not in header or not isinstance(header[name]["shape"], list):
            continue
        entry, what = header[name], rng.randrange(5)
        if what == 0:
            del header[name]
        elif what == 1:
            header[rng.choice([*names, "midlayer.self_attn.q_norm.weight", "fc_norm.9.weight", "mask", ""])] = (
                header.pop(name)
            )
        elif what == 2:
            entry["dtype"] = rng.choice(["F32", "F16", "BF16", "F64", "I64", "I8", "BOOL", "F8_E4M3", "x", 3])
        elif what == 3:
            shape = list(entry["shape"])
            rng.shuffle(shape)
            entry["shape"] = rng.choice([shape, [*shape, 1], shape[:-1], [0, *shape[1:]], [2**40, 2**40], [-1], 7])
        else:
            begin, end = entry["data_offsets"]
            moved = rng.choice([4, -4, 2**40, -begin])
            entry["data_offsets"] = [begin + moved, end + rng.choice([moved, 0])]
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + n :]


def _other_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the data with flipped bits, a region gone or put in, or the end cut off."""
    raw, what = bytearray(data), rng.randrange(4)
    at = rng.randrange(len(raw))
    if what == 0:
        for _ in range(rng.randint(1, 8)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif what == 1:
        raw[at : at + rng.randint(0, 24)] = rng.randbytes(rng.randint(0, 24))
    elif what == 2:
        del raw[at:]
    else:
        raw[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\x00\x00\xc0\x7f" * 2, b"9999999999", b"[" * 5000])
    return bytes(raw)
