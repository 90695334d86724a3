"""Convert a BERT checkpoint to the parts of a GGUF: configuration, tensors and WordPiece vocabulary.

A checkpoint that classifies texts, as cross-encoders do, keeps the layers that make the scores.

BERT: Devlin et al. 2018, arXiv:1810.04805. A folder of sentence-transformers (Reimers and Gurevych 2019,
arXiv:1908.10084) also says how the vectors of the tokens become one vector of the text; modules.json names that step.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.model_kinds import POOLING_RANK, Pooling, number_of
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.gguf_writer import Metadata, OutTensor
from edgedec_export.hf.tensors import float_pieces, matrix_kind, require_floats
from edgedec_export.hf.vocabulary import CONTROL, NORMAL, SPACE, UNUSED, TokenizerFiles, steps
from edgedec_runtimes.weights.config_values import ConfigValues, shown
from edgedec_runtimes.weights.safetensors import Tensor, read_json, read_json_list

_OUTER = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_LAYER_NAME = re.compile(r"encoder\.layer\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
_HEAD = {
    "pooler.dense.weight": "cls.weight",
    "pooler.dense.bias": "cls.bias",
    "classifier.weight": "cls.output.weight",
    "classifier.bias": "cls.output.bias",
}
_CLASSIFIER = "BertForSequenceClassification"
# What a text's vector is not made of: the pooler of the next-sentence task, the head of pre-training, a buffer.
_UNUSED = re.compile(r"(pooler\.|cls\.|embeddings\.position_ids).*")
# llama.cpp adds the first row of the token types to floats, and has no addition of another type.
_ALWAYS_F32 = ("token_types.weight", "position_embd.weight")
_REMEDY = "llama.cpp computes no such BERT; take a ready-made GGUF of the model, or another model"
_ROLES = {"[CLS]": ("bos", "cls"), "[SEP]": ("eos", "seperator"), "[UNK]": ("unknown",)}
_ROLES |= {"[PAD]": ("padding",), "[MASK]": ("mask",)}


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The shape and settings of a BERT.

    Attributes:
        pooling: How the vectors of tokens become one of the text; None where the folder does not say it.
        classifies: Whether layers behind the last one score a text.
    """

    n_ctx_train: int
    n_vocab: int
    n_types: int
    n_embd: int
    n_layer: int
    n_head: int
    n_ff: int
    norm_epsilon: float
    pooling: Pooling | None
    classifies: bool


def bert_parts(
    folder: Path, checkpoint: Mapping[str, Tensor], matrix_type: GGMLType | None
) -> tuple[list[OutTensor], Metadata]:
    """Return the tensors and the metadata of the GGUF of a BERT, except the keys that every GGUF has.

    Args:
        folder: The checkpoint.
        checkpoint: Its tensors.
        matrix_type: Type of the matrices; None keeps their types. Vectors and positions become F32.

    Raises:
        ModelNotFoundError: A file is missing.
        ModelFormatError: A file is damaged, or two files contradict each other.
        UnsupportedModelError: A setting, a module or the tokenizer can't be converted.
        StorageError: A file can't be read.
    """
    config = read_bert_config(folder)
    tensors = _tensors(checkpoint, config, matrix_type, folder)
    return tensors, _entries(config) | _vocabulary(folder, config.n_vocab)


def read_bert_config(folder: Path) -> BertConfig:
    """Return the configuration of a folder's config.json and of its pooling (raises what bert_parts raises)."""
    path = folder / "config.json"
    raw = {key: value for key, value in read_json(path).items() if value is not None}
    values = ConfigValues(path, raw, _REMEDY)
    for key, expected in {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}.items():
        if raw.get(key, expected) != expected:
            values.refuse(key, f"expected {expected}")
    config = BertConfig(
        n_ctx_train=values.whole("max_position_embeddings", 512),
        n_vocab=values.whole("vocab_size", 30522),
        n_types=values.whole("type_vocab_size", 2),
        n_embd=values.whole("hidden_size", 768),
        n_layer=values.whole("num_hidden_layers", 12, most=4096),
        n_head=values.whole("num_attention_heads", 12),
        n_ff=values.whole("intermediate_size", 3072),
        norm_epsilon=values.number("layer_norm_eps", 1e-12),
        pooling=pooling_of_modules(folder),
        classifies=_CLASSIFIER in (raw.get("architectures") or ()),
    )
    if config.n_embd % config.n_head:
        values.fail(f"{config.n_head} heads can't share {config.n_embd} numbers evenly")
    return config


def _entries(config: BertConfig) -> Metadata:
    entries: Metadata = {
        "bert.block_count": config.n_layer,
        "bert.context_length": config.n_ctx_train,
        "bert.embedding_length": config.n_embd,
        "bert.feed_forward_length": config.n_ff,
        "bert.attention.head_count": config.n_head,
        "bert.attention.layer_norm_epsilon": config.norm_epsilon,
        "bert.attention.causal": False,
        "tokenizer.ggml.token_type_count": config.n_types,
    }
    if config.classifies:
        entries["bert.pooling_type"] = POOLING_RANK
    elif config.pooling is not None:
        entries["bert.pooling_type"] = number_of(config.pooling)
    return entries


def _tensors(
    checkpoint: Mapping[str, Tensor], config: BertConfig, matrix_type: GGMLType | None, folder: Path
) -> list[OutTensor]:
    shapes = _shapes(config, checkpoint["classifier.weight"].shape[0] if "classifier.weight" in checkpoint else 1)
    outer = _OUTER | _HEAD if config.classifies else _OUTER
    placed: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        plain = name.removeprefix("bert.")
        if _UNUSED.fullmatch(plain) and plain not in outer:
            continue
        layer = _LAYER_NAME.fullmatch(plain)
        target = outer.get(plain)
        if layer and layer[2] in _LAYER:
            target = f"blk.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
        if target not in shapes or target in placed:
            raise UnsupportedModelError(
                f"{folder}: tensor {name!r} does not belong to a BERT of {config.n_layer} layers, or occurs twice; of "
                f"the heads only that of {_CLASSIFIER} is converted (architectures in config.json)"
            )
        placed[target] = tensor
    tensors = []
    for name, shape in shapes.items():
        if name not in placed:
            raise ModelFormatError(f"{folder}: the tensor for {name!r} is missing; download the whole checkpoint")
        tensor = placed[name]
        require_floats(tensor, shape)
        kind = GGMLType.F32 if name in _ALWAYS_F32 else matrix_kind(tensor, matrix_type)
        tensors.append(OutTensor(name, tensor.shape[::-1], kind, partial(float_pieces, tensor, kind)))
    return tensors


def _shapes(config: BertConfig, n_labels: int) -> dict[str, tuple[int, ...]]:
    """Return all tensors of the GGUF, in the order of a forward, with their shapes in the checkpoint's order.

    `n_labels` is how many scores a text gets.
    """
    e, f = config.n_embd, config.n_ff
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.n_vocab, e),
        "position_embd.weight": (config.n_ctx_train, e),
        "token_types.weight": (config.n_types, e),
        "token_embd_norm.weight": (e,),
        "token_embd_norm.bias": (e,),
    }
    sizes = {"ffn_up": (f, e), "ffn_down": (e, f)}
    for i in range(config.n_layer):
        for short in _LAYER.values():
            weight = (e,) if short.endswith("_norm") else sizes.get(short, (e, e))
            shapes |= {f"blk.{i}.{short}.weight": weight, f"blk.{i}.{short}.bias": weight[:1]}
    if config.classifies:
        shapes |= {"cls.weight": (e, e), "cls.bias": (e,), "cls.output.weight": (n_labels, e)}
        shapes["cls.output.bias"] = (n_labels,)
    return shapes


def _vocabulary(folder: Path, n_vocab: int) -> Metadata:
    """Return the metadata of a WordPiece vocabulary.

    llama.cpp writes a space before the tokens that begin a word; tokenizer.json has ## before the others.
    """
    files = TokenizerFiles(folder, "WordPiece")
    rules = _rules(files)
    by_id = {number: token for token, number in files.vocab.items()}
    if len(by_id) != len(files.vocab) or max(by_id) >= n_vocab:
        files.fail(f"its tokens don't have the ids below {n_vocab}, each once")
    special = {entry.get("content") for entry in files.json.get("added_tokens") or [] if isinstance(entry, dict)}
    unlisted = sorted(str(token)[:40] for token in special if token not in files.vocab)
    if unlisted:
        files.refuse(f"its added token {unlisted[0]!r} is not in its vocabulary")
    missing = [token for token in ("[CLS]", "[SEP]", "[UNK]") if token not in files.vocab]
    if missing:
        files.refuse(f"it has no token {missing[0]}")
    shown_tokens, kinds = [], []
    for number in range(n_vocab):
        token = by_id.get(number)
        is_control = token in special or token in _ROLES
        kinds.append(UNUSED if token is None else CONTROL if is_control else NORMAL)
        if token is None:
            token = f"[PAD{number}]"
        elif not is_control:
            token = token[2:] if token.startswith("##") and len(token) > 2 else SPACE + token
        shown_tokens.append(token.encode(errors="replace"))
    if len(set(shown_tokens)) < n_vocab:
        files.refuse("two of its tokens differ in ## alone from the form that llama.cpp keeps them in")
    entries: Metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": shown_tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }
    for token, roles in _ROLES.items():
        if token in files.vocab:
            entries |= {f"tokenizer.ggml.{role}_token_id": files.vocab[token] for role in roles}
    return entries | rules


def _rules(files: TokenizerFiles) -> Metadata:
    """Return the metadata for what a tokenizer does otherwise than BERT's; refuse what no key says."""
    normalizers = steps(files.json.get("normalizer"), "normalizers")
    rules = normalizers[0] if normalizers else {}
    if [step.get("type") for step in normalizers] != ["BertNormalizer"]:
        files.refuse(f"its normalizer is {shown(files.json.get('normalizer'))}, expected BertNormalizer")
    for key in ("clean_text", "handle_chinese_chars"):
        if rules.get(key, True) is not True:
            files.refuse(f"its normalizer has {key} {shown(rules[key])}, expected true")
    pre = [step.get("type") for step in steps(files.json.get("pre_tokenizer"), "pretokenizers")]
    if pre != ["BertPreTokenizer"]:
        files.refuse(f"its pre_tokenizer is {shown(pre)}, expected BertPreTokenizer")
    if files.model.get("continuing_subword_prefix", "##") != "##":
        files.refuse(f"its model has continuing_subword_prefix {shown(files.model['continuing_subword_prefix'])}")
    if files.model.get("max_input_chars_per_word", 100) != 100:
        files.refuse(f"its model has max_input_chars_per_word {shown(files.model['max_input_chars_per_word'])}")
    lowers = rules.get("lowercase", True) is True
    strips = lowers if (stripping := rules.get("strip_accents")) is None else stripping is True
    if lowers and strips:
        return {}
    return {"tokenizer.ggml.normalizer.lowercase": lowers, "tokenizer.ggml.normalizer.strip_accents": strips}


_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


def pooling_of_modules(folder: Path) -> Pooling | None:
    """Return the pooling that the modules of a folder name; None where there are none.

    Raises:
        UnsupportedModelError: There is a module, or a pooling, that a GGUF can't express.
        ModelNotFoundError, ModelFormatError, StorageError: A file is missing, damaged, or can't be read.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    pooling: Pooling | None = None
    for module in read_json_list(path):
        kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind not in _MODULES:
            raise UnsupportedModelError(f"{path}: it has a module {shown(kind)}, expected {', '.join(_MODULES)}")
        if kind == "Pooling":
            where = module.get("path")
            if not isinstance(where, str) or not re.fullmatch(r"[\w-]+", where):
                raise ModelFormatError(f"{path}: its module Pooling has the path {shown(where)}, expected a folder")
            pooling = _pooling_of(folder / where / "config.json")
    return pooling


def _pooling_of(path: Path) -> Pooling:
    values: dict[str, Any] = read_json(path)
    mode = values.get("pooling_mode")
    if isinstance(mode, str) and mode in _POOLING_NAMES:
        return _POOLING_NAMES[mode]
    modes = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    if mode is not None or len(modes) != 1 or modes[0] not in _POOLING_FLAGS:
        what = shown(mode) if mode is not None else ", ".join(modes) or "none"
        raise UnsupportedModelError(
            f"{path}: its pooling is {what}, expected one of {', '.join(_POOLING_FLAGS)}; take another model"
        )
    return _POOLING_FLAGS[modes[0]]
