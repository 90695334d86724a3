"""Export Hugging Face checkpoints with optimum, for architectures that edgedec's own code does not know.

    folder = export_via_optimum("checkpoint/", "model-onnx", environment=environment_folder(cache_dir))

optimum runs in a process and an environment of its own; torch is never imported here. The result is a folder like that
of our own exports: a graph, a file of weights, a vocabulary that our tokenizer reads, and a manifest with hashes.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec import __version__
from edgedec.errors import ModelError, ModelFormatError, ModelNotFoundError, RequestError, UnsupportedModelError
from edgedec.gguf.file import DATA, VOCABULARY, read_gguf
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_export.folder import new_folder, write_manifest
from edgedec_export.gguf_writer import Metadata, write_gguf
from edgedec_export.hf.tokenizer import tokenizer_entries
from edgedec_export.onnx_graph.library import require_onnx
from edgedec_export.optimum.child_process import last_line, run_child
from edgedec_export.optimum.environment import ensure_environment
from edgedec_models.hubs.hub_spec import parse_hub
from edgedec_runtimes.onnx.exported import OPTIMUM
from edgedec_runtimes.onnx.foreign.contract import Contract
from edgedec_runtimes.tokenizer import refusal

_CHILD = Path(__file__).with_name("child.py")
_MOST = 2**24
_N_CTX_UNKNOWN = 2048  # for a configuration without a longest context


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to export.

    Attributes:
        name: For messages, and for the model's metadata.
        where: What transformers loads: a folder, or OWNER/REPO of a hub.
        revision: Branch, tag or commit on the hub.
    """

    name: str
    where: str
    revision: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint's configuration says, checked.

    Attributes:
        n_ctx_train: Longest context, in tokens.
        roles: Token ids of "bos" and "eos", where the configuration names them.
        commit: Commit on the hub, or None.
        versions: Versions of the packages that export the checkpoint.
    """

    architecture: str
    n_vocab: int
    n_embd: int
    n_head: int
    n_ff: int
    n_ctx_train: int
    roles: dict[str, int]
    commit: str | None
    versions: dict[str, str]


def find_checkpoint(source: str | Path) -> Checkpoint:
    """Return the checkpoint that a name stands for: a folder with config.json, or hf:OWNER/REPO[@REVISION].

    Raises:
        ModelNotFoundError: The folder does not exist or has no config.json, and the name is not one of a hub.
        RequestError: The name is that of a file, or of one file of a repository.
    """
    name = os.fspath(source)
    if name.startswith("hf:"):
        spec = parse_hub(name)
        if spec.what:
            raise RequestError(f"{name}: optimum takes a whole repository; leave out {':' + spec.what!r}")
        return Checkpoint(name, spec.repo_id, spec.revision, is_folder=False)
    folder = Path(name)
    if folder.is_file():
        raise RequestError(
            f"{name}: this is a file, expected a Hugging Face checkpoint: a folder with config.json, or hf:OWNER/REPO"
        )
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{name}: there is no folder of this name with a config.json; pass such a folder, or hf:OWNER/REPO"
        )
    return Checkpoint(folder.resolve().name, str(folder.resolve()), "main", is_folder=True)


def export_via_optimum(
    source: str | Path,
    out: str | Path,
    *,
    environment: Path,
    offline: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Export a checkpoint with optimum and return the path of the folder that was written.

    Args:
        source: A folder with config.json, tokenizer and weights, or hf:OWNER/REPO[@REVISION]. Code that comes with the
            checkpoint is not run.
        out: The folder to write. It must not exist, or with `force` it may hold an earlier export, which is replaced.
        environment: Folder of optimum's environment, which is made at the first use (environment.py).
        offline: Fetch neither packages nor the checkpoint.
        on_progress: Called at each step.
        cancel: Stops the export; nothing is left on the disk, except an environment that is complete.

    Raises:
        RequestError: `out` may not be written, or the source is no checkpoint.
        ModelNotFoundError: There is no such checkpoint.
        UnsupportedModelError: optimum cannot export the checkpoint, edgedec does not know its tokenizer, or its graph
            cannot be run.
        ModelFormatError: A file of the checkpoint is damaged.
        OfflineError, RuntimeUnavailableError: optimum or the package onnx is missing and cannot be installed.
        StorageError: A file cannot be read or written, or the disk is full.
        CancelledError: `cancel` was cancelled.
    """
    require_onnx()
    from edgedec_export.optimum.graph import rewrite_graph  # here, because that file imports onnx

    checkpoint = find_checkpoint(source)
    with new_folder(Path(out), force=force) as folder:
        python = ensure_environment(environment, offline=offline, on_progress=on_progress, cancel=cancel)
        run = _Steps(python, checkpoint, folder / "work", offline or checkpoint.is_folder, on_progress, cancel)
        run.step("describe")
        facts = _read_facts(run.work)
        _write_vocabulary(run.work, folder / VOCABULARY, checkpoint, facts, None)
        run.step("export")
        contract, sha256 = rewrite_graph(run.work / "model.onnx", folder, on_progress=on_progress, cancel=cancel)
        _write_vocabulary(run.work, folder / VOCABULARY, checkpoint, facts, contract)
        shutil.rmtree(run.work)
        write_manifest(folder, _manifest(checkpoint, facts, contract), {DATA: sha256})
        run.check()
    return Path(out)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Runs the steps of child.py, which write into the folder `work`."""

    python: Path
    checkpoint: Checkpoint
    work: Path
    offline: bool
    on_progress: OnProgress | None
    cancel: CancelToken | None

    def step(self, step: str) -> None:
        """Run a step; raise UnsupportedModelError with its last line of output if it fails."""
        self.check()
        self.work.mkdir(exist_ok=True)
        where = self.checkpoint
        request = {"step": step, "model": where.where, "revision": where.revision, "offline": self.offline}
        words = json.dumps(request | {"out": str(self.work)})
        command: list[str | Path] = [self.python, "-I", "-X", "utf8", _CHILD, words]
        report_progress(self.on_progress, step, 0, 1, "%", where.name)
        log = self.work / "optimum.log"
        status = run_child(command, log, what=self._what, environment=self._environment(), cancel=self.cancel)
        if status != 0:
            raise UnsupportedModelError(
                f"{where.name}: optimum cannot export it ({last_line(log)}); take a complete checkpoint of an "
                "architecture that optimum knows, or a GGUF of the model"
            )
        report_progress(self.on_progress, step, 1, 1, "%", where.name)

    def check(self) -> None:
        """Raise CancelledError if the export was cancelled."""
        check_cancelled(self.cancel, self._what)

    @property
    def _what(self) -> str:
        return f"exporting {self.checkpoint.name}"

    def _environment(self) -> dict[str, str]:
        """Return our environment variables, changed so that the packages send no reports and, offline, nothing."""
        more = {"HF_HUB_OFFLINE": "1"} if self.offline else {}
        silent = {"HF_HUB_DISABLE_TELEMETRY": "1", "ORT_DISABLE_TELEMETRY": "1"}
        return dict(os.environ) | silent | {"TOKENIZERS_PARALLELISM": "false"} | more


def _read_facts(work: Path) -> CheckpointFacts:
    """Read and check what the step "describe" wrote."""
    raw = json.loads((work / "facts.json").read_text(encoding="utf-8"))
    n_embd = _whole(raw, "n_embd")
    roles = {}
    for role in ("bos", "eos"):
        value = raw[role][0] if isinstance(raw[role], list) and raw[role] else raw[role]
        if type(value) is int and value >= 0:
            roles[role] = value
    return CheckpointFacts(
        architecture=str(raw["architecture"])[:80],
        n_vocab=_whole(raw, "n_vocab"),
        n_embd=n_embd,
        n_head=_whole(raw, "n_head"),
        n_ff=_whole(raw, "n_ff", 4 * n_embd),
        n_ctx_train=_whole(raw, "n_ctx_train", _N_CTX_UNKNOWN),
        roles=roles,
        commit=raw["commit"],
        versions=raw["versions"],
    )


def _whole(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of the configuration."""
    value = raw[key] if raw[key] is not None else default
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ModelFormatError(
            f"the checkpoint's configuration has {str(value)[:40]} as {key}, expected a whole number from 1 to "
            f"{_MOST}; download the checkpoint again"
        )
    return value


def _write_vocabulary(
    work: Path, path: Path, checkpoint: Checkpoint, facts: CheckpointFacts, contract: Contract | None
) -> None:
    """Write the metadata of a GGUF. Without a contract this only tests whether the tokenizer is known.

    Raises:
        UnsupportedModelError: The tokenizer is unknown, or the graph has another number of logits.
    """
    d, prefix = facts, facts.architecture
    c = contract or Contract(1, d.n_head, d.n_embd // d.n_head, None, has_positions=True)
    if c.n_vocab not in (None, d.n_vocab):
        raise UnsupportedModelError(
            f"{checkpoint.name}: its graph has {c.n_vocab} logits, but config.json says {d.n_vocab}; take a GGUF of "
            "the model"
        )
    sizes = {
        "block_count": c.n_layer,
        "context_length": d.n_ctx_train,
        "embedding_length": d.n_embd,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": c.n_head_kv,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "vocab_size": d.n_vocab,
    }
    entries: Metadata = {
        "general.architecture": prefix,
        "general.type": "model",
        "general.name": checkpoint.name,
        **{f"{prefix}.{key}": size for key, size in sizes.items()},
    }
    try:
        entries |= tokenizer_entries(work, d.n_vocab, d.roles)
    except ModelError as error:
        raise type(error)(str(error).replace(str(work), checkpoint.name)) from error
    write_gguf(path, entries, [])
    reason = refusal(read_gguf(path))
    if reason is not None:
        raise UnsupportedModelError(f"{checkpoint.name}: {reason}; take a GGUF of the model and the llamacpp runtime")


def _manifest(checkpoint: Checkpoint, facts: CheckpointFacts, contract: Contract) -> dict[str, Any]:
    """Return what the manifest says of the model and the export, beside its list of files."""
    source: dict[str, Any] = {"name": checkpoint.name}
    if checkpoint.is_folder:
        config = (Path(checkpoint.where) / "config.json").read_bytes()
        source["sha256_of_config"] = hashlib.sha256(config).hexdigest()
    else:
        source |= {"revision": checkpoint.revision, "commit": facts.commit}
    return {
        "target": "cpu",
        "kind": OPTIMUM,
        "quant": "float32",
        "kv": "f32",
        "edgedec": __version__,
        "made_with": facts.versions,
        "source": source,
        "architecture": facts.architecture,
        "n_layer": contract.n_layer,
        "n_vocab": facts.n_vocab,
        "n_embd": facts.n_embd,
        "n_head_kv": contract.n_head_kv,
        "head_dim": contract.head_dim,
        "local_layers": [],
    }
