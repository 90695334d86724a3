"""Fixtures of the tests of exports for NPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama

from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_export.npu.export import export_npu
from edgedec_export.quantizing import bundled_text
from edgedec_runtimes.npu.runtime import Npu

pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama that the reference runtime reads, too."""
    return tiny_llama(tmp_path_factory.mktemp("npu") / "tiny.gguf")


@pytest.fixture(scope="session")
def exported(source: Path) -> Path:
    """Its export, for sessions of up to 256 tokens."""
    return export_npu(source, source.with_name("export"), contexts=(64, 256), calibration=bundled_text()[:1200])


@pytest.fixture(scope="session")
def cut_in_two(source: Path) -> Path:
    """An export whose feed-forward blocks all take products above 0.25, a tenth of them, apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgedec_export.npu.writer.limits", lambda seen: dict.fromkeys(seen.usual, 0.25))
        return export_npu(source, source.with_name("cut"), contexts=(64,), calibration=bundled_text()[:1200])


@pytest.fixture(scope="module")
def model(exported: Path) -> Iterator[Model]:
    """The export on ONNX Runtime's CPU provider."""
    with Npu().load(exported, LoadOptions(device="cpu", n_threads=1)) as model:
        yield model
