"""What Python and the native library share: one table, compared when the library is loaded."""

import ctypes

import pytest

from edgedec.errors import RuntimeUnavailableError
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.cpu import library
from edgedec_runtimes.cpu.native_tables import NAMES, NUMBERS, STRUCTURES, header


def test_the_library_was_compiled_with_these_tables() -> None:
    """Sizes and names; the first of a table is 0."""
    library.compare(library.native())
    assert all(NUMBERS[names[0]] == 0 for names in NAMES.values())
    assert len(NUMBERS) == sum(map(len, NAMES.values())) + 6


def test_a_library_of_other_structures_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field too many in Python, and names in another order."""
    native = library.native()

    class Longer(ctypes.Structure):
        _fields_ = (("item", library.Item), ("more", ctypes.c_int32))

    with monkeypatch.context() as patch:
        patch.setitem(library.STRUCTURES, "ec_item", Longer)
        with pytest.raises(RuntimeUnavailableError, match=r"ec_item with \d+ bytes, expected"):
            library.compare(native)
    monkeypatch.setattr(library, "VERSION", 1)
    with pytest.raises(RuntimeUnavailableError, match=r"has interface \d+, expected 1;"):
        library.compare(native)


def test_every_declared_function_is_declared_to_ctypes() -> None:
    """Results and arguments of a few of them, with pointers, texts and numbers; one that is missing has its name."""
    native = library.native()
    assert native.ec_forward.argtypes == [*(ctypes.c_void_p,) * 2, ctypes.c_int32, *(ctypes.c_void_p,) * 3]
    assert native.ec_row_nucleus.argtypes[2:4] == [ctypes.c_int64, ctypes.c_double]
    assert (native.ec_last_error.restype, native.ec_model_destroy.restype) == (ctypes.c_char_p, None)
    with pytest.raises(RuntimeUnavailableError, match="has no ec_unheard_of"):
        library.declare(native, "EC_API int32_t ec_unheard_of(void);")


def test_a_switch_is_a_field_of_that_name() -> None:
    """So a new one is written in Switches, in ec_config and where it acts."""
    names = {declared.rsplit(" ", 1)[-1] for declared in STRUCTURES["ec_config"]}
    ours = {"rope", "rope_sliding", "sliding", "unrotated", "convolution_length", "recurrence"}  # of layers, or tensors
    assert set(Switches.__dataclass_fields__) - ours <= names
    assert "early_router;" in header()
