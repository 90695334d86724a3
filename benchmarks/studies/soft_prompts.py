"""Whether tuned vectors before a text repair a crushed model (IDP, Hoang et al. 2023, arXiv:2310.00867).

    python benchmarks/studies/soft_prompts.py smollm2-135m --prompts FILE.jsonl --work FOLDER --json-out FILE \
        --crush "layer-skip 1.05" "Q2_K file" "IQ2_XS file" --learn both KL

A file is llama.cpp's, with an importance matrix. 16 vectors begin as the best of eight beginnings of texts ("hard") and
learn by Adam from prose, code, or both in turn; for "KL" from both, by the divergence from the whole model. Torch
computes perplexities of texts of other documents, and of a third kind: alone, behind 16 more tokens of the text itself,
behind each prompt; "against" has the ratios to the hard prompt with intervals of 95 % over texts. "chosen" is the
prompt that makes a text's first quarter likeliest, "hindsight" the best one for the rest; both have their ratio to
"both" on that rest. What --work has is not made again.
"""

import argparse
import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import ResolveOptions
from edgedec.loading.resolve import resolve
from edgedec_apps.bench.provenance import report
from edgedec_export.training.network import Tensor
from edgedec_export.training.rows.llama import TorchLlama
from edgedec_export.training.rows.soft_prompt import ROWS, logits_behind, tuned, whole_llama, write_prompt
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.layer_skip.choose import choose_layers, variant
from edgedec_runtimes.layer_skip.layer_sets import Half, left_out
from edgedec_runtimes.llamacpp.library import llama

N, WINDOW, QUARTER = 16, 256, 64
FILE_TYPES = {"Q2_K file": 10, "IQ2_XS file": 20}
_ENDS = ("attn_output", "ffn_down")  # the last matrix of each half of a layer
Texts = dict[str, tuple[list[Tensor], list[Tensor]]]


class Entry(ctypes.Structure):
    """A matrix's importance, as llama.cpp reads it."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Importance(TorchFunctionMode):  # type: ignore[misc]  # torch is an extra, and untyped here
    """Sums the squares of what enters each matrix, by its name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names, self.sums = {id(tensor): name for name, tensor in tensors.items()}, dict[str, Any]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if function is F.linear and (name := self.names.get(id(args[1]))):
            self.sums[name] = self.sums.get(name, 0) + args[0].float().square().sum(0).numpy()
        return function(*args, **(kwargs or {}))


def read_texts(tokenizer: Any, prompts: Path) -> Texts:
    """Return by kind texts to learn from, and texts of other documents; each has N tokens, and WINDOW behind them."""
    asked = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    files = [path for path in sorted(Path(os.__file__).parent.glob("*.py")) if path.stat().st_size > 8000]
    pages = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    documents = {
        "prose": [each["turns"][0] for each in asked if each["task"] in ("summarization", "rag")],
        "code": [path.read_text(encoding="utf-8")[2000:6000] for path in files],
        "manual": [path.read_text(encoding="utf-8") for path in pages],
    }
    texts: Texts = {kind: ([], []) for kind in documents}
    for kind, each in documents.items():
        Random(0).shuffle(each)
        for i, document in enumerate(each):
            ids = torch.tensor(tokenizer.encode(document, add_special=False))
            cut = ids[: len(ids) // (N + WINDOW) * (N + WINDOW)].view(-1, N + WINDOW)
            texts[kind][i % 4 == 0 or kind == "manual"].extend(cut[:3])
        for part in texts[kind]:
            Random(1).shuffle(part)
    return texts


def write_crushed(path: Path, out: Path, file_type: int, sums: Mapping[str, Any]) -> None:
    """Write a GGUF of another type by llama.cpp's quantizer, with an importance matrix."""
    entries = (Entry * (len(sums) + 1))(*(Entry(each.encode(), v.ctypes.data, v.size) for each, v in sums.items()))
    params = llama().llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = file_type, True
    params.imatrix = ctypes.cast(entries, ctypes.c_void_p)
    if llama().llama_model_quantize(os.fsencode(path), os.fsencode(out), ctypes.byref(params)):
        raise SystemExit(f"{out}: llama.cpp could not write it")


def skipped(name: str, path: Path) -> list[Half]:
    """Return the half-layers that a crushed model leaves out."""
    speedup = float(name.split()[1]) if name.startswith("layer-skip") else 1.0
    return left_out(choose_layers(layer_bytes(path), speedup).layers)


def crushed(name: str, path: Path, whole: TorchLlama, sums: Mapping[str, Any], work: Path) -> TorchLlama:
    """Return the model, crushed as its name says."""
    tensors, out = dict(whole.tensors), work / f"{name}.gguf"
    for layer, half in skipped(name, path):
        zeroed = f"blk.{layer}.{_ENDS[half]}.weight"
        tensors[zeroed] = torch.zeros_like(tensors[zeroed])
    if name in FILE_TYPES:
        if not out.exists():
            write_crushed(path, out, FILE_TYPES[name], sums)
        for each in gguf.GGUFReader(out).tensors:
            values = torch.from_numpy(np.array(gguf.quants.dequantize(each.data, each.tensor_type)))
            tensors[each.name] = values.to(whole.tensors[each.name].dtype)
    return TorchLlama(whole.parts, tensors)


def losses(net: TorchLlama, prefix: Tensor, texts: Sequence[Tensor]) -> Any:
    """Return the negative log-likelihoods of each text's last WINDOW - 1 tokens behind vectors, f32[n, WINDOW - 1]."""
    with torch.no_grad():
        each = [F.cross_entropy(logits_behind(net, prefix, text), text[1:], reduction="none") for text in texts]
    return np.stack([one[1 - WINDOW :].numpy() for one in each])


def ratio(before: Any, after: Any) -> list[float]:
    """Return the perplexity after to that before, and its interval."""
    gains = (after - before).mean(1)
    draws = gains[np.random.default_rng(0).integers(0, len(gains), (4000, len(gains)))].mean(1)
    return [round(float(np.exp(each)), 4) for each in (gains.mean(), *np.quantile(draws, (0.025, 0.975)))]


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of one kind of text, whose losses these are."""
    row: dict[str, Any] = {name: round(float(np.exp(each.mean())), 3) for name, each in found.items()}
    row["against"] = {name: ratio(found["hard"], each) for name, each in found.items()}
    each = np.stack([found[name] for name in ("both", "prose", "code") if name in found])
    rest = each[..., QUARTER:]
    for name, costs in (("chosen", each[..., :QUARTER].mean(2)), ("hindsight", rest.mean(2))):
        row[name] = ratio(rest[0], rest[costs.argmin(0), np.arange(rest.shape[1])])
    return row


def main() -> None:
    """Crush, tune and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON object a line: task, turns")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--crush", nargs="+", required=True)
    parser.add_argument("--learn", nargs="+", required=True, help="both, prose, code, KL")
    parser.add_argument("--texts", type=int, default=64, help="that each prompt learns from")
    parser.add_argument("--held", type=int, default=20, help="texts of each kind")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = resolve(args.model, ResolveOptions())
    with edgedec.load(path, runtime="cpu", offline=True, draft="off", n_ctx=512) as engine:
        texts = read_texts(engine.tokenizer, args.prompts)
    whole = whole_llama(TargetParts.of(read_gguf(path)))
    learning = {kind: texts[kind][0] for kind in ("prose", "code")}
    learning["both"] = learning["KL"] = [each for two in zip(*learning.values(), strict=False) for each in two]
    with Importance(whole.tensors) as importance:
        losses(whole, empty := torch.empty(0, whole.parts.network.n_embd), learning["both"][:32])
    for name in args.crush:
        if (args.work / f"{name}.json").exists():
            continue
        net, store = crushed(name, path, whole, importance.sums, args.work), args.work / f"{name}.npz"
        prefixes = {kind: torch.from_numpy(each) for kind, each in np.load(store).items()} if store.exists() else {}
        begin = [F.embedding(text[:N], net.tensors[ROWS]).float() for text in learning["both"][:8]]
        if "hard" not in prefixes:
            prefixes["hard"] = min(begin, key=lambda each: losses(net, each, learning["both"][8:16]).mean())
        for kind in (each for each in args.learn if each not in prefixes):
            teacher, lessons = whole if kind == "KL" else None, [text[N:] for text in learning[kind]]
            prefixes[kind] = tuned(net, prefixes["hard"], lessons, teacher, args.texts)
            np.savez(store, **{each: values.numpy() for each, values in prefixes.items()})
            write_prompt(
                args.work / f"{name} {kind}.gguf", prefixes[kind], whole.parts.network, variant(skipped(name, path))
            )
        row: dict[str, Any] = {"model": name}
        for kind, (_, held) in texts.items():
            cut = [text[N:] for text in held[: args.held]]
            found = {"alone": losses(net, empty, cut), "own context": losses(net, empty, held[: args.held])}
            row[kind] = figures(found | {each: losses(net, prefix, cut) for each, prefix in prefixes.items()})
        (args.work / f"{name}.json").write_text(json.dumps(row), encoding="utf-8")
    setting = {"model": args.model, "rows": N, "texts": args.texts, "held": args.held}
    results = [json.loads((args.work / f"{name}.json").read_text(encoding="utf-8")) for name in args.crush]
    report({"benchmark": "soft_prompts", **setting, "results": results}, args.json_out)


if __name__ == "__main__":
    main()
