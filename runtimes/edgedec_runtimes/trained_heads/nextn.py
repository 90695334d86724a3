"""Read the nextn layer of a model's file, or of a file that holds such layers alone, as a draft head.

A matrix joins the embedding of a token and the state that the model had one position before, after its last norm. The
result goes through a layer like the model's own, with a KV cache of its own. The normed output scores the token that
follows, and takes the place of the model's state when drafting goes on (multi-token prediction, arXiv:2412.19437).

How many tokens a head drafts that reads its target's output matrix: the first ones of the vocabulary, or all.

Tokenizers number tokens in the order in which their training found them: frequent ones come first, and their rows of
the output matrix lie together. A vocabulary that was extended for more languages has most tokens of a script at its
end. With the first tokens alone, a head would draft next to nothing of a text in that script.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF, ValueType
from edgedec.gguf.metadata import get_array, get_text
from edgedec_runtimes.architectures.nextn import IN_PLACE, nextn_layer, nextn_model
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.gguf_values import HeadFile
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.shapes import checked_head

_PARTS = {"joint": "nextn.eh_proj", "input_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}
_OWN = {"embedding": "token_embd.weight", "output": "output.weight"}


def read_nextn(gguf: GGUF) -> Head:
    """Return the head that the first nextn layer of a file is.

    Raises:
        ModelFormatError: The file is damaged, or contradicts itself.
        UnsupportedModelError: The file has no nextn layer, or one that the cpu runtime does not run.
        StorageError, MemoryCapError: The file can't be read, or there is no memory for it.
    """
    number = nextn_layer(gguf)
    if number is None:
        raise UnsupportedModelError(f"{gguf.paths[0]}: it has no nextn layer; name another draft head")
    layers = nextn_model(gguf)
    network = read_network(layers)
    file, of_layer = HeadFile(gguf, network.architecture), HeadFile(layers, network.architecture)
    names = {part: f"blk.{number}.{short}.weight" for part, short in _PARTS.items()} | {"fc_norm": "output_norm.weight"}
    if missing := [name for name in names.values() if name not in gguf.tensors]:
        file.fail(f"it has no tensor {missing[0]!r}")
    tensors = {part: file.weight(name) for part, name in names.items()}
    in_place = {other for short, other in IN_PLACE.items() if f"blk.{number}.{short}" in gguf.tensors}
    tensors |= {part: of_layer.weight(name) for part, name in _OWN.items() if name in in_place}
    n_target = network.n_vocab
    card = HeadCard(
        name=f"{get_text(gguf, 'general.name') or file.path.stem} nextn",
        n_embd=network.n_embd,
        n_embd_target=network.n_embd,
        n_ff=network.n_ff,
        n_head=network.n_head,
        n_head_kv=network.n_head_kv,
        head_dim=network.head_dim,
        rms_epsilon=network.rms_epsilon,
        rope_base=network.rope_base,
        taps=(number,),
        n_vocab_draft=n_target,
        n_vocab_target=n_target,
        fc_norm="joined",
        feeds_back_normed=True,
        own_embedding="embedding" in tensors,
        own_output="output" in tensors,
        joins=True,
    )
    head = checked_head(file.path, card, tensors, np.arange(n_target), n_taps=1, layers=layers)
    return head.shortened(n_listed(gguf, n_target))


LISTED = 1 << 16
"""How many tokens are drafted of a vocabulary that is more than twice as large and has all scripts among them."""
_SAMPLE = 1 << 13  # about so many tokens of a vocabulary are looked at
_LEAST_SHARE = 0.01  # of the vocabulary that a script has
_LEAST_FOUND = 0.5  # of what a script would have among the first tokens if its tokens were spread evenly
# UTF-8 characters by their first byte: Latin, Greek, Cyrillic, Hebrew, Arabic, others; Indic and Thai, others; kana,
# Han, Hangul, others.
_BORDERS = (0xC3, 0xCB, 0xCE, 0xD0, 0xD4, 0xD6, 0xD8, 0xDC, 0xE0, 0xE1, 0xE3, 0xE4, 0xEA, 0xEE)


def n_listed(gguf: GGUF, n_vocab: int) -> int:
    """Return how many tokens of a model's vocabulary a head should draft, from the first one on."""
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if n_vocab <= 2 * LISTED or tokens is None:
        return n_vocab
    step, in_bytes = max(1, n_vocab // _SAMPLE), get_text(gguf, "tokenizer.ggml.model") == "gpt2"
    scripts = [script_of(token, in_bytes=in_bytes) for token in tokens.strings()[::step]]
    return LISTED if _are_among(scripts[: LISTED // step], scripts) else n_vocab


def _are_among(first: Sequence[int], scripts: Sequence[int]) -> bool:
    """Return whether every script that some tokens of the vocabulary have is among the first of them, too."""
    counts, whole = Counter(first), Counter(scripts)
    share = len(first) / len(scripts) * _LEAST_FOUND
    large = [script for script, n in whole.items() if script and n >= _LEAST_SHARE * len(scripts)]
    return all(counts[script] >= share * whole[script] for script in large)


def script_of(token: bytes, *, in_bytes: bool) -> int:
    """Return a number of the script that a token's first character outside of ASCII is of; 0 where it has none.

    Args:
        token: The token, UTF-8 as the file has it.
        in_bytes: Each character of the token stands for one byte, as in GPT-2's vocabulary.

    >>> script_of("猫".encode(), in_bytes=False) == script_of("çĮ«".encode(), in_bytes=True) > 0
    True
    >>> script_of(b" cat", in_bytes=False)
    0
    """
    if token.isascii():
        return 0
    for character in token.decode(errors="ignore"):
        byte = ord(character) if in_bytes else character.encode()[0]
        if 0xC3 <= byte <= 0xF4:
            return bisect_right(_BORDERS, byte)
    return 0
