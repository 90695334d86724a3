"""Each concern in which systems differ has one file that knows it; no other file of the product names a system."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("edgedec", "runtimes/edgedec_runtimes", "models/edgedec_models", "export/edgedec_export")
PRODUCT = (*PACKAGES, "apps/edgedec_apps", "methods/edgedec_methods")

RUNTIMES, APPS = "runtimes/edgedec_runtimes", "apps/edgedec_apps"
EDGES = {
    f"{APPS}/cli/chat/echo.py": "terminals: what they show of what is typed",
    f"{APPS}/cli/commands/learn.py": "the priority of a process",
    f"{APPS}/cli/interrupts.py": "signals that end the program",
    f"{APPS}/limits.py": "limits that a process sets itself",
    f"{RUNTIMES}/cpu/native/edgedec_cpu.h": "how a library exports its functions",
    f"{RUNTIMES}/cpu/native/kernels/arm_features.cpp": "instructions of Arm processors",
    f"{RUNTIMES}/cpu/native/threads/system.cpp": "threads on cores, naps, the number of a process",
    f"{RUNTIMES}/cpu/native/weights/file.cpp": "reading files, huge pages",
    f"{RUNTIMES}/cpu/native/weights/mapping.cpp": "faults in mapped files",
    f"{RUNTIMES}/cpu/tiles/huge_pages.py": "huge pages",
    f"{RUNTIMES}/shared/cpu_count.py": "which cores a process may use",
    f"{RUNTIMES}/shared/file_lock.py": "locks on files",
    f"{RUNTIMES}/shared/native.py": "names of native libraries, the library of C",
    f"{RUNTIMES}/shared/pages.py": "private memory, mapped files, the cache of files",
    "edgedec/memory/system.py": "how much memory there is and is held",
    "edgedec/processes.py": "processes that started others",
    "edgedec/processor.py": "what the processor is",
    "edgedec/storage/probe_cache.py": "how often other programs took the processor",
    "export/edgedec_export/training/kinds.py": "where torch comes from",
}
OF_SYSTEMS = re.compile(
    r"sys\.platform|\bos\.name\b|os\.uname|platform\.(win32|mac_ver)|[\"']/(proc|sys)/|\bwinerror\b|"
    r"\bimport (fcntl|termios|resource|msvcrt|winreg|pwd|tty)\b|ctypes\.(windll|CDLL\(None)|\bos\.(fork|killpg)\b|"
    r"signal\.(SIGKILL|SIGHUP)|\"SIGHUP\"|\bmmap\.M(ADV|AP)_|\.madvise\(|posix_fadvise|O_DIRECT|F_NOCACHE|"
    r"#include <(sys/|unistd|windows|sched|pthread|signal)|_WIN32|__APPLE__|__linux__|_MSC_VER"
)

pytestmark = pytest.mark.skipif(not (ROOT / "edgedec").is_dir(), reason="the sources are not beside the tests")


def test_only_edge_files_know_systems() -> None:
    """What is in the table, and nothing else, has code that is for one system or another."""
    found = {
        str(path.relative_to(ROOT).as_posix())
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.*")
        if path.suffix in (".py", ".cpp", ".h", ".inl") and OF_SYSTEMS.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(EDGES)
