"""Typed access to the GGUF of a trained head: settings under its architecture's name, tensors, the list of tokens.

Keys of edgedec's own: `edgedec.head` (a record) and `edgedec.head.token_ids`, which stands for d2t in a file without
an output matrix. llama.cpp does not take a shorter d2t beside the target's matrix.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF, ValueType
from edgedec.gguf.metadata import WHOLE, get_array, get_bool, get_float, get_int, get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import HeadTensor
from edgedec_runtimes.trained_heads.record import MOST_LAYERS, MOST_TAPS, RECORD_KEY, Record, parse_record
from edgedec_runtimes.weights.levels import LEVELS

TOKEN_IDS_KEY = f"{RECORD_KEY}.token_ids"
D2T = "d2t"
MOST_VALUES = 2**24


class FileTensor(HeadTensor):
    """A tensor whose bytes are read whenever they are asked for, so that a head is light until its weights are used."""

    __slots__ = ("_gguf",)
    _gguf: GGUF

    def __init__(self, gguf: GGUF, name: str) -> None:
        tensor = gguf.tensors[name]
        bare = replace(gguf, metadata={}, tensors={name: tensor})
        for field, value in {"shape": tensor.shape[::-1], "type": tensor.type, "_gguf": bare}.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> NDArray[np.uint8]:
        """The rows, read anew (raises as GGUF.read_tensor_bytes)."""
        return np.frombuffer(self._gguf.read_tensor_bytes(next(iter(self._gguf.tensors))), np.uint8)


@dataclass(frozen=True, slots=True)
class HeadFile:
    """The GGUF of a head.

    Attributes:
        architecture: Its `general.architecture`, the first part of the names of its settings.
    """

    gguf: GGUF
    architecture: str

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self.gguf.paths[0]

    def whole(self, key: str, default: int | None = None, most: int = MOST_VALUES) -> int:
        """Return an integer from 1 to `most`."""
        value = get_int(self.gguf, f"{self.architecture}.{key}", at_least=1, at_most=most)
        if value is None and default is None:
            self.fail(f"the metadata has no {self.architecture}.{key}")
        return default if value is None else value  # type: ignore[return-value]  # fail does not return

    def counted(self, key: str) -> int:
        """Return an integer of at least 0, which an absent one is."""
        return get_int(self.gguf, f"{self.architecture}.{key}", at_most=MOST_VALUES) or 0

    def positive(self, key: str) -> float | None:
        """Return a positive number; None where the key is absent."""
        value = get_float(self.gguf, f"{self.architecture}.{key}")
        if value is not None and not 0 < value < 1e30:
            self.fail(f"{self.architecture}.{key} is {value}, expected a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = get_bool(self.gguf, f"{self.architecture}.{key}")
        return default if value is None else value

    def text(self, key: str) -> str | None:
        """Return a text; None where the key is absent."""
        return get_text(self.gguf, f"{self.architecture}.{key}")

    def layers(self, key: str) -> tuple[int, ...]:
        """Return layers of the target, all different."""
        name = f"{self.architecture}.{key}"
        values = get_array(self.gguf, name, WHOLE)
        if values is None or not 1 <= len(values) <= MOST_TAPS:
            self.fail(f"the metadata has no {name} of 1 to {MOST_TAPS} layers")
        layers = tuple(int(i) for i in values.numpy())
        if len(set(layers)) != len(layers) or not all(0 <= i <= MOST_LAYERS for i in layers):
            self.fail(f"{name} is {layers}, expected different layers from 0 to {MOST_LAYERS}")
        return layers

    def record(self) -> Record:
        """Return edgedec's record; an empty one where there is none (raises what parse_record raises)."""
        text = get_text(self.gguf, RECORD_KEY)
        return Record() if text is None else parse_record(text, self.path)

    def check_known(self, keys: frozenset[str], tensors: frozenset[str], form: str) -> None:
        """Refuse settings and tensors that edgedec does not know: they could change what the head drafts."""
        prefix = f"{self.architecture}."
        present = (key.removeprefix(prefix) for key in self.gguf.metadata if key.startswith(prefix))
        if unknown := sorted(key for key in present if key not in keys):
            self.refuse(unknown[0], "which edgedec does not know")
        if names := sorted(self.gguf.tensors.keys() - tensors - {D2T}):
            raise UnsupportedModelError(
                f"{self.path}: tensor {names[0][:80]!r} is none that {form} has; edgedec does not run this "
                "head: take one without it"
            )

    def weight(self, name: str) -> HeadTensor:
        """Return a tensor, as it is stored."""
        tensor = self.gguf.tensors[name]
        if tensor.type not in FLOATS and tensor.type not in LEVELS:
            kinds = ", ".join(kind.name for kind in (*FLOATS, *LEVELS))
            raise UnsupportedModelError(
                f"{self.path}: tensor {tensor.name!r} is {tensor.type.name}, expected one of {kinds}; take the head in "
                "another quantization"
            )
        if len(tensor.shape) not in (1, 2, 3):
            self.fail(f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions, expected 1 to 3")
        return FileTensor(self.gguf, name)

    def n_vocab(self) -> int:
        """Return the size of the target's vocabulary, by the list of tokens or by `vocab_size`."""
        tokens = get_array(self.gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
        return self.whole("vocab_size") if tokens is None else len(tokens)

    def d2t(self, n_draft: int | None, n_target: int) -> NDArray[np.int64]:
        """Return int64[n], the target's token ids of the output matrix's rows.

        Args:
            n_draft: Rows of the head's own output matrix; None where it has none.
        """
        tensor, listed = self.gguf.tensors.get(D2T), get_array(self.gguf, TOKEN_IDS_KEY, WHOLE)
        if tensor is not None:
            if tensor.type not in (GGMLType.I64, GGMLType.I32) or len(tensor.shape) != 1:
                self.fail(f"d2t is {tensor.type.name} of shape {tensor.shape}, expected a vector of I64")
            if n_draft is None and tensor.shape[0] != n_target:
                self.fail("it has d2t, but no output matrix whose rows d2t names")
            raw = np.frombuffer(self.gguf.read_tensor_bytes(D2T), "<i8" if tensor.type is GGMLType.I64 else "<i4")
            return raw.astype(np.int64)
        if listed is not None and n_draft is None:
            ids = listed.numpy()
            if ids.size and int(ids.max()) >= n_target:
                self.fail(f"{TOKEN_IDS_KEY} names tokens beyond the target's {n_target}")
            return ids.astype(np.int64)
        if n_draft not in (None, n_target):
            self.fail(f"its output matrix has {n_draft} rows for {n_target} tokens, but no d2t says which")
        return np.arange(n_target, dtype=np.int64)

    def card(
        self, record: Record, *, taps: tuple[int, ...], n_embd_target: int, n_draft: int, n_target: int
    ) -> HeadCard:
        """Return what heads of all forms say of themselves; the rest of the card has its defaults."""
        n_embd, n_head = self.whole("embedding_length"), self.whole("attention.head_count")
        head_dim = self.whole("attention.key_length", max(1, n_embd // n_head))
        n_head_kv = self.whole("attention.head_count_kv", n_head)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (actual := self.whole(key, head_dim)) != head_dim:
                self.refuse(key, f"{actual}, expected {head_dim}, the length of a head")
        if n_head % n_head_kv or head_dim % 2:
            self.fail(f"{n_head} heads of size {head_dim} cannot share {n_head_kv} key-value heads")
        epsilon, base = (self.positive(key) for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"))
        if epsilon is None:
            self.fail(f"the metadata has no {self.architecture}.attention.layer_norm_rms_epsilon")
        return HeadCard(
            name=record.name or get_text(self.gguf, "general.name") or self.path.stem,
            n_embd=n_embd,
            n_embd_target=n_embd_target,
            n_ff=self.whole("feed_forward_length"),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            rms_epsilon=epsilon,
            rope_base=10000.0 if base is None else base,
            taps=taps,
            n_vocab_draft=n_draft,
            n_vocab_target=n_target,
            own_embedding="token_embd.weight" in self.gguf.tensors,
            own_output="output.weight" in self.gguf.tensors,
            target=record.target,
            promise=record.promise,
        )

    def linear_factor(self) -> float:
        """Return by what positions are divided; refuse another scaling than "linear"."""
        kind = self.text("rope.scaling.type")
        factor = self.positive("rope.scaling.factor")
        if kind not in (None, "none", "linear"):
            self.refuse("rope.scaling.type", f"{kind[:40]!r}, expected linear or none")
        return 1.0 if kind == "none" or factor is None else factor

    def refuse(self, key: str, actual: str) -> NoReturn:
        """Raise UnsupportedModelError for a setting."""
        raise UnsupportedModelError(
            f"{self.path}: {self.architecture}.{key[:80]} is {actual}; edgedec does not run this head: take one "
            "without it"
        )

    def fail(self, actual: str) -> NoReturn:
        """Raise ModelFormatError."""
        raise ModelFormatError(f"{self.path}: {actual}; the file is damaged or was converted wrongly: take another one")


def with_linear_divisors(file: HeadFile, tensors: dict[str, HeadTensor], head_dim: int) -> None:
    """Add the tensor rope_divisors where the settings divide positions and the file has no such tensor."""
    if "rope_divisors" not in tensors and (factor := file.linear_factor()) != 1:
        tensors["rope_divisors"] = HeadTensor.of(np.full(head_dim // 2, factor, np.float32))
