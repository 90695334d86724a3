"""A tiny T5 as optimum exports one: a folder of an encoder's and a decoder's graph, with the weights of its GGUF.

folder = write_folder(tmp_path / "t5", TinyT5(), merged=True)
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.models.tiny_t5 import END, PAD, TOKENS, UNK, TinyT5, range_of, unigram

_FAR, _NEVER = 1024, np.float32(-1e9)  # more than any distance here; what keeps scores off a token
_OF_SOURCE, _MASK, _HIDDEN, _BRANCH = (
    "attention_mask encoder_attention_mask encoder_hidden_states use_cache_branch".split()
)


class _Graph:
    """Collects the nodes of a graph; each method returns the name of what it adds."""

    def __init__(self, t5: TinyT5) -> None:
        self.t5, self.weights = t5, t5.weights()
        self.nodes, self.arrays = list[Any](), dict[str, NDArray[Any]]()

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = name or f"{operator}_{len(self.nodes)}_{id(self)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def value(self, values: Any) -> str:
        name, array = f"value_{len(self.arrays)}_{id(self)}", np.array(values)
        self.arrays[name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        return name

    def times(self, x: str, name: str) -> str:
        self.arrays[name] = np.ascontiguousarray(self.weights[name].T)
        return self.add("MatMul" if self.arrays[name].ndim > 1 else "Mul", x, name)

    def embedded(self) -> str:
        self.arrays["token_embd"] = self.weights["token_embd.weight"]
        return self.add("Gather", "token_embd", "input_ids")

    def normed(self, x: str, name: str) -> str:
        mean = self.add("ReduceMean", self.add("Mul", x, x), axes=[-1])
        return self.times(self.add("Div", x, self.add("Sqrt", self.add("Add", mean, self.value(1e-6)))), name)

    def heads(self, x: str, name: str) -> str:
        rows = self.add("Reshape", self.times(x, name), self.value([1, -1, self.t5.n_head, self.t5.head_dim]))
        return self.add("Transpose", rows, perm=[0, 2, 1, 3])

    def attended(self, p: str, x: str, kv: Sequence[str], bias: str) -> str:
        scores = self.add("MatMul", self.heads(x, f"{p}_q.weight"), self.add("Transpose", kv[0], perm=[0, 1, 3, 2]))
        shares = self.add("Softmax", self.add("Add", scores, bias), axis=-1)
        rows = self.add("Transpose", self.add("MatMul", shares, kv[1]), perm=[0, 2, 1, 3])
        return self.times(
            self.add("Reshape", rows, self.value([1, -1, self.t5.n_head * self.t5.head_dim])), f"{p}_o.weight"
        )

    def fed(self, p: str, x: str) -> str:
        h = self.normed(x, f"{p}.ffn_norm.weight")
        gate = self.times(h, f"{p}.ffn_gate.weight")
        cube = self.add("Mul", self.add("Mul", self.add("Mul", gate, gate), gate), self.value(0.044715))
        inner = self.add("Tanh", self.add("Mul", self.add("Add", gate, cube), self.value((2 / np.pi) ** 0.5)))
        gelu = self.add("Mul", self.add("Mul", gate, self.value(0.5)), self.add("Add", inner, self.value(1.0)))
        up = self.add("Mul", gelu, self.times(h, f"{p}.ffn_up.weight"))
        return self.add("Add", x, self.times(up, f"{p}.ffn_down.weight"))

    def length(self, name: str, axis: int) -> str:
        return self.add("Gather", self.add("Shape", name), self.value(axis))

    def by_distance(self, side: str, n_past: str, n_all: str, *, causal: bool) -> str:
        """Add what scores get by distance, f32[1, n_head, n_all - n_past, n_all]."""
        distances, table = np.arange(-_FAR, _FAR + 1), self.weights[f"{side}.blk.0.attn_rel_b.weight"]
        rows = table[[range_of(d, self.t5.n_buckets, both_ways=side == "enc") for d in distances.tolist()]]
        rows = np.where(distances[:, None] > 0, _NEVER, rows) if causal else rows
        queries = self.add("Unsqueeze", self.add("Range", n_past, n_all, self.value(1)), self.value([1]))
        places = self.add("Sub", self.add("Range", self.value(0), n_all, self.value(1)), queries)
        bias = self.add("Gather", self.value(rows), self.add("Add", places, self.value(_FAR)))
        return self.add("Unsqueeze", self.add("Transpose", bias, perm=[2, 0, 1]), self.value([0]))

    def masked(self, mask: str) -> str:
        hidden = self.add("Mul", self.add("Sub", self.value(1.0), self.add("Cast", mask, to=1)), self.value(_NEVER))
        return self.add("Unsqueeze", hidden, self.value([1, 2]))

    def encoder(self) -> None:
        x, bias = self.embedded(), self.by_distance("enc", self.value(0), self.length("input_ids", 1), causal=False)
        bias = self.add("Add", bias, self.masked(_OF_SOURCE))
        for p in (f"enc.blk.{i}" for i in range(self.t5.n_encoder)):
            h = self.normed(x, f"{p}.attn_norm.weight")
            kv = [self.heads(h, f"{p}.attn_{part}.weight") for part in "kv"]
            x = self.fed(p, self.add("Add", x, self.attended(f"{p}.attn", h, kv, bias)))
        self.add("Identity", self.normed(x, "enc.output_norm.weight"), name="last_hidden_state")

    def decoder(self, to: str = "", *, later: bool, causal: bool = True) -> None:
        """Add a decoder; `to` stands before its outputs."""
        past, kv = "past_key_values.{}.{}.{}".format, (("k", "key"), ("v", "value"))
        x, n_past = self.embedded(), self.length(past(0, "decoder", "key"), 2) if later else self.value(0)
        n_all = self.add("Add", n_past, self.length("input_ids", 1))
        bias, seen = self.by_distance("dec", n_past, n_all, causal=causal), self.masked(_MASK)
        for i in range(self.t5.n_decoder):
            p, text, source = f"dec.blk.{i}", list[str](), list[str]()
            h = self.normed(x, f"{p}.attn_norm.weight")
            for part, name in kv:
                rows = [*([past(i, "decoder", name)] if later else []), self.heads(h, f"{p}.attn_{part}.weight")]
                text.append(self.add("Concat", *rows, axis=2, name=f"{to}present.{i}.decoder.{name}"))
                of = past(i, "encoder", name) if later else self.heads(_HIDDEN, f"{p}.cross_attn_{part}.weight")
                source.append(self.add("Identity", of, name=f"{to}present.{i}.encoder.{name}"))
            x = self.add("Add", x, self.attended(f"{p}.attn", h, text, bias))
            h = self.normed(x, f"{p}.cross_attn_norm.weight")
            x = self.fed(p, self.add("Add", x, self.attended(f"{p}.cross_attn", h, source, seen)))
        x = self.times(self.normed(x, "dec.output_norm.weight"), "output.weight")
        self.add("Identity", x, name=f"{to}logits")


def _merged(t5: TinyT5, outputs: Sequence[str]) -> _Graph:
    """Return a decoder with a branch for later tokens and one for the first."""
    from onnx import TensorProto, helper

    whole, branches = _Graph(t5), {}
    for to, later in (("then_", True), ("else_", False)):
        branch = _Graph(t5)
        branch.decoder(to, later=later)
        values = [helper.make_tensor_value_info(f"{to}{name}", TensorProto.FLOAT, None) for name in outputs]
        branches[f"{to}branch"] = helper.make_graph(branch.nodes, to, [], values)
        whole.arrays |= branch.arrays
    whole.nodes.append(helper.make_node("If", [_BRANCH], list(outputs), **branches))
    return whole


def _save(path: Path, made: _Graph, inputs: Sequence[str], outputs: Sequence[str], rows: int | str = "n") -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    t5, shapes = made.t5, dict[str, list[int | str]]()
    shapes |= {"input_ids": ["b", rows], _BRANCH: [1], "logits": ["b", "n", len(TOKENS)]}
    shapes |= {_OF_SOURCE: ["b", "s"], _MASK: ["b", "s"]}
    shapes |= {_HIDDEN: ["b", "s", t5.n_embd], "last_hidden_state": ["b", "s", t5.n_embd]}
    kinds = dict.fromkeys(("input_ids", _OF_SOURCE, _MASK), TensorProto.INT64) | {_BRANCH: TensorProto.BOOL}
    ports = [
        [
            helper.make_tensor_value_info(
                name, kinds.get(name, TensorProto.FLOAT), shapes.get(name, ["b", t5.n_head, "p", t5.head_dim])
            )
            for name in names
        ]
        for names in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in made.arrays.items()]
    graph = helper.make_graph(made.nodes, path.stem, ports[0], ports[1], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_folder(
    folder: Path, t5: TinyT5, *, merged: bool = False, causal: bool = True, rows: int | str = "n", kind: str = "t5"
) -> Path:
    """Write a folder, and return its path.

    Args:
        merged: Whether the decoder is one graph for first and later tokens.
        causal: Whether later tokens that come together don't see those behind them.
        rows: Tokens that the later decoder takes: any number, or so many.
        kind: "t5", or "marian" as which it is said to be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i}.{s}.{p}" for s, i, p in product(("decoder", "encoder"), range(t5.n_decoder), ("key", "value"))]
    past, outputs = [f"past_key_values.{name}" for name in names], ["logits", *(f"present.{name}" for name in names)]
    graph = _Graph(t5)
    graph.encoder()
    _save(folder / "encoder_model.onnx", graph, ["input_ids", _OF_SOURCE], ["last_hidden_state"])
    if merged:
        inputs = ["input_ids", _MASK, _HIDDEN, *past, _BRANCH]
        _save(folder / "decoder_model_merged.onnx", _merged(t5, outputs), inputs, outputs)
    else:
        first, later = _Graph(t5), _Graph(t5)
        first.decoder(later=False)
        later.decoder(later=True, causal=causal)
        _save(folder / "decoder_model.onnx", first, ["input_ids", _HIDDEN, _MASK], outputs)
        outputs = outputs[: 1 + len(names) // 2]
        _save(folder / "decoder_with_past_model.onnx", later, ["input_ids", _MASK, *past], outputs, rows)
    write_texts(folder, t5, kind)
    return folder


def write_texts(folder: Path, t5: TinyT5, kind: str = "t5") -> None:
    """Write config.json, generation_config.json and tokenizer.json."""
    sizes = {"t5": "num_layers num_decoder_layers num_heads d_ff n_positions"}.get(
        kind, "encoder_layers decoder_layers decoder_attention_heads decoder_ffn_dim max_position_embeddings"
    )
    numbers = (t5.n_encoder, t5.n_decoder, t5.n_head, t5.n_ff, t5.n_ctx)
    config = {"model_type": kind, "d_model": t5.n_embd, "vocab_size": len(TOKENS), "eos_token_id": END}
    config |= dict(zip(sizes.split(), numbers, strict=True)) | ({"d_kv": t5.head_dim} if kind == "t5" else {})
    generation = {"decoder_start_token_id": PAD, "bad_words_ids": [[PAD]], "forced_eos_token_id": END}
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    end = {"</s>": {"id": "</s>", "ids": [END], "tokens": ["</s>"]}}
    scored = zip(TOKENS, unigram()["tokenizer.ggml.scores"].tolist(), strict=True)
    tokenizer = {
        "added_tokens": [{"id": i, "content": TOKENS[i]} | flags for i in (PAD, END, UNK)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": end},
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": [[text, score] for text, score in scored]},
    }
    for name, document in (("config", config), ("generation_config", generation), ("tokenizer", tokenizer)):
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
