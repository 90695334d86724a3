"""The program that runs in optimum's environment, and is never imported by edgedec: python child.py REQUEST.

The request is a JSON object with the keys step ("describe" or "export"), model (a folder, or OWNER/REPO), revision,
offline and out. The step "describe" writes the tokenizer's files and facts.json into the folder `out`, the step
"export" the graph. Code that comes with a checkpoint is never run. Where a step fails, the last line of output says
why.
"""

import json
import os
import sys
import threading
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_PACKAGES = ("optimum", "optimum-onnx", "transformers", "torch", "onnx")


def describe(request: dict[str, Any]) -> None:
    """Write the tokenizer, and facts.json with sizes under our own names; null where the configuration has none."""
    from transformers import AutoConfig, AutoTokenizer  # type: ignore[import-not-found, unused-ignore]

    where = {"revision": request["revision"], "local_files_only": request["offline"], "trust_remote_code": False}
    config = AutoConfig.from_pretrained(request["model"], **where)
    text = config.get_text_config()
    AutoTokenizer.from_pretrained(request["model"], **where).save_pretrained(request["out"])
    facts = {
        "architecture": config.model_type,
        "n_vocab": text.vocab_size,
        "n_embd": text.hidden_size,
        "n_head": text.num_attention_heads,
        "n_ff": _first(text, _WIDTHS),
        "n_ctx_train": _first(text, _LENGTHS),
        "bos": config.bos_token_id,
        "eos": config.eos_token_id,
        "commit": getattr(config, "_commit_hash", None),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }
    (Path(request["out"]) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def export(request: dict[str, Any]) -> None:
    """Write model.onnx, and beside it files of weights where the model is large."""
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found, unused-ignore]

    main_export(
        request["model"],
        output=request["out"],
        task="text-generation-with-past",
        framework="pt",
        library_name="transformers",
        dtype="fp32",
        revision=request["revision"],
        local_files_only=request["offline"],
        trust_remote_code=False,
        do_validation=False,
    )


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the first of these attributes that the configuration has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _end_with_the_parent() -> None:
    """Wait until the parent closes our standard input, as its end does, then end this process."""
    os.read(0, 1)  # not through sys.stdin, whose lock no thread may hold when Python ends
    os._exit(1)


def main() -> None:
    """Run a step; the exit status is 1 where it failed."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    request = json.loads(sys.argv[1])
    try:
        {"describe": describe, "export": export}[request["step"]](request)
    except Exception as error:  # whatever the packages raise
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
