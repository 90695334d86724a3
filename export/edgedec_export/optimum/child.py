"""What runs in the environment of optimum, and is never imported here: python child.py REQUEST.

The request is a JSON object: step ("describe" or "export"), model (a folder, or OWNER/REPO), revision, offline, out.
"describe" writes the tokenizer's files and facts.json into the folder `out`, "export" the graph. Code that a checkpoint
brings along is never run. The last line of an error's output says what went wrong.
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
    """Write the tokenizer, and facts.json: sizes under names of our own; null where the configuration says nothing."""
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
    """Write model.onnx, with files of weights beside it where it is large."""
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
    """Return the first of these entries that there is."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _end_with_the_parent() -> None:
    """End the process when the pipe to the parent is closed."""
    os.read(0, 1)  # not by sys.stdin, whose lock a thread may not hold at the end
    os._exit(1)


def main() -> None:
    """Do a step; the exit status is 1 where it failed."""
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
