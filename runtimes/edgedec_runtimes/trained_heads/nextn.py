"""Read the nextn layer of a model's file, or of a file that holds such layers alone, as a draft head.

A matrix joins the embedding of a token and the state that the model had one position before, after its last norm. The
result goes through a layer like the model's own, with a KV cache of its own. The normed output scores the token that
follows, and takes the place of the model's state when drafting goes on (multi-token prediction, arXiv:2412.19437).
"""

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec_runtimes.architectures.nextn import IN_PLACE, nextn_layer, nextn_model
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.gguf_values import HeadFile
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.listed_tokens import n_listed
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
