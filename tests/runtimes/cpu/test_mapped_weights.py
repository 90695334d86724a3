"""Tile files that are cut short or written to while they are mapped: errors of the forward, never a signal's end."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file short"),
]

PATIENCE_S = 120.0

# Loads the model argv[1] with the cache argv[2]; the test's own lines follow.
START = """
import ctypes, faulthandler, mmap, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from edgedec.errors import EdgedecError, StorageError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu

PATH, CACHE = Path(sys.argv[1]), Path(sys.argv[2])
TOKENS = np.random.default_rng(0).integers(0, 260, 256).astype(np.int32)

def load(**options):
    return Cpu().load(PATH, LoadOptions(n_ctx=512, n_threads=2, cache_dir=CACHE, **options))

def tile_file():
    (path,) = CACHE.glob("tiles/*.tiles")
    return path

def bits(session):
    return session.forward(TOKENS, n_past=0).logits.tobytes()

def refused(act):
    try:
        act()
    except StorageError as error:
        return str(error)
    raise SystemExit("no error")

def cut_while_busy(session, n_bytes=0):
    # Cut the file while forwards run without a pause, and return the error of the one that notices.
    threading.Timer(0.3, lambda: os.truncate(tile_file(), n_bytes)).start()
    def run():
        while True:
            session.forward(TOKENS, n_past=0)
    return refused(run)

def foreign_fault():
    # A fault in a mapping that is none of ours.
    path = CACHE / "foreign"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        os.truncate(path, 0)
        return mapped[5]

class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p)] + (
        [("mask", ctypes.c_uint32), ("flags", ctypes.c_int)]
        if sys.platform == "darwin"
        else [("mask", ctypes.c_byte * 128), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
    )

SIGINFO = 0x40 if sys.platform == "darwin" else 4
libc = ctypes.CDLL(None)
kept = []

def install(function, flags=SIGINFO):
    # Install a handler as a library in C does, and return the one before.
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    kept.append(kind(function))
    old = Action()
    new = Action(handler=ctypes.cast(kept[-1], ctypes.c_void_p).value, flags=flags)
    assert libc.sigaction(int(signal.SIGBUS), ctypes.byref(new), ctypes.byref(old)) == 0
    return old

def installed():
    now = Action()
    assert libc.sigaction(int(signal.SIGBUS), None, ctypes.byref(now)) == 0
    return now.handler
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tiles take hundreds of pages."""
    return tiny_llama(tmp_path_factory.mktemp("mapped") / "m.gguf", n_embd=128, n_ff=512, n_layer=6)


def run(path: Path, cache: Path, lines: str) -> tuple[int, str, str]:
    """Run lines in a process of their own; return its exit status, output and standard error."""
    command = [sys.executable, "-c", START + textwrap.dedent(lines), str(path), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def succeeds(path: Path, cache: Path, lines: str) -> str:
    """Run lines in a process of their own, which must end by itself; return what they print."""
    code, output, errors = run(path, cache, lines)
    assert code == 0, (code, errors)
    return output


@pytest.mark.parametrize("n_bytes", [0, 5000, 400_000])
def test_a_file_cut_short_under_load_is_an_error(path: Path, tmp_path: Path, n_bytes: int) -> None:
    """The forward fails, all later ones fail alike, closing works, and the next load has the same bits again."""
    lines = f"""
        model = load()
        session, other = model.session(512), model.session(512)
        expected = bits(session)
        first = cut_while_busy(session, {n_bytes})
        later = {{refused(act) for act in (
            lambda: session.forward(TOKENS[:1], n_past=0),
            lambda: other.forward(TOKENS, n_past=0),
            lambda: session.save(),
            lambda: model.session(16),
        )}}
        print(first, later == {{first}})
        session.close()
        model.close()
        with load() as model:
            print(bits(model.session(512)) == expected)
        """
    output = succeeds(path, tmp_path, lines)
    assert "the tiles of m.gguf are damaged: " in output
    assert output.endswith("Their file was deleted: load the model again True\nTrue\n")


@pytest.mark.parametrize("change", ["os.truncate(path, 0); path.write_bytes(data)", "path.open('r+b').write(data[:1])"])
def test_a_file_written_to_while_in_use_is_an_error(path: Path, tmp_path: Path, change: str) -> None:
    """A change that causes no fault, as the file has its size again, fails the next forward; sound tiles stay."""
    lines = f"""
        model = load()
        session = model.session(512)
        expected, path = bits(session), tile_file()
        data = path.read_bytes()
        time.sleep(0.02)
        {change}
        print(refused(lambda: bits(session)))
        model.close()
        with load() as model:
            print(bits(model.session(512)) == expected)
        """
    output = succeeds(path, tmp_path, lines)
    assert output == (
        "the file of the weights was changed while they were in use: the tiles of m.gguf are sound now; "
        "load the model again\nTrue\n"
    )


def test_a_thread_that_blocks_all_signals_is_safe(path: Path, tmp_path: Path) -> None:
    """A fault while SIGBUS is blocked would end the process whatever handler there is; forwards let it through."""
    lines = """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with load() as model:
            print(cut_while_busy(model.session(512)))
        print(signal.SIGBUS in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """
    assert succeeds(path, tmp_path, lines).endswith("Their file was deleted: load the model again\nTrue\n")


def test_another_fault_ends_the_process_as_without_us(path: Path, tmp_path: Path) -> None:
    """A fault in a mapping of the application's own, and a signal sent by a process, do what they do by default."""
    for act in ("foreign_fault()", "os.kill(os.getpid(), signal.SIGBUS); time.sleep(60)"):
        code, output, errors = run(path, tmp_path, f"model = load()\n{act}\nprint('went on')")
        assert (code, output, errors) == (-signal.SIGBUS, "", "")


@pytest.mark.parametrize("order", ["faulthandler.enable(); model = load()", "model = load(); faulthandler.enable()"])
def test_the_fault_handler_of_python_works(path: Path, tmp_path: Path, order: str) -> None:
    """Enabled before or after the load, it prints its traceback of a foreign fault; ours is an error all the same."""
    code, output, errors = run(path, tmp_path, f"{order}\nbits(model.session(512))\nforeign_fault()")
    assert (code, output) == (-signal.SIGBUS, "")
    assert "Fatal Python error: Bus error" in errors
    assert "in foreign_fault" in errors
    output = succeeds(
        path, tmp_path, f"{order}\nsession = model.session(512)\nbits(session)\nprint(cut_while_busy(session))"
    )
    assert output.endswith("Their file was deleted: load the model again\n")


@pytest.mark.parametrize("chains", [False, True], ids=["alone", "calls ours"])
@pytest.mark.parametrize("first", [False, True], ids=["after the load", "before the load"])
def test_the_handler_of_an_application_works(path: Path, tmp_path: Path, first: bool, chains: bool) -> None:
    """One installed before or after ours, that calls the one before it or not, gets foreign faults, and only those."""
    lines = f"""
        def on_fault(number, info, context):
            if {chains} and old.handler:
                kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
                calls.append(1)
                if len(calls) > 3:
                    os._exit(44)
                if not {first}:
                    os.write(1, b"passed on\\n")
                    os._exit(43)
            os._exit(42)

        calls = []
        if {first}:
            old = install(on_fault)
        model = load()
        if not {first}:
            old = install(on_fault)
        session = model.session(512)
        bits(session)
        print(cut_while_busy(session), flush=True)
        foreign_fault()
        """
    code, output, _ = run(path, tmp_path, lines)
    assert code == (43 if chains and not first else 42)
    assert "Their file was deleted: load the model again\n" in output


def test_handlers_that_call_each_other_come_to_an_end(path: Path, tmp_path: Path) -> None:
    """An application's handler that calls ours, below it, and is called by ours, above it: a foreign fault ends."""
    lines = """
        def on_fault(number, info, context):
            os.write(1, b"mine\\n")
            kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
            kind(old.handler)(number, info, context)

        model = load()
        session = model.session(512)
        old = install(on_fault)
        mine = installed()
        bits(session)
        print(installed() not in (mine, old.handler), flush=True)
        foreign_fault()
        """
    code, output, _ = run(path, tmp_path, lines)
    assert (code, output) == (-signal.SIGBUS, "True\nmine\n")


def test_handlers_of_other_kinds(path: Path, tmp_path: Path) -> None:
    """A handler in Python and one that ignores get signals sent by a process, as without us."""
    lines = "model = load()\nos.kill(os.getpid(), signal.SIGBUS)\nprint('went on')"
    told = "signal.signal(signal.SIGBUS, lambda number, frame: print('signal', number == signal.SIGBUS))\n"
    assert succeeds(path, tmp_path, told + lines) == "signal True\nwent on\n"
    assert succeeds(path, tmp_path, f"signal.signal(signal.SIGBUS, signal.SIG_IGN)\n{lines}") == "went on\n"


def test_the_handler_goes_with_the_last_model(path: Path, tmp_path: Path) -> None:
    """While mapped weights are loaded there is a handler; afterwards there is the one of before."""
    lines = """
        before = installed()
        first, second = load(), load()
        print(installed() == before)
        first.close()
        print(installed() == before)
        second.close()
        print(installed() == before)
        with load(runtime_options={"mmap": False}):
            print(installed() == before)
        """
    assert succeeds(path, tmp_path, lines) == "False\nFalse\nTrue\nTrue\n"


def test_without_mapping_the_file_may_go(path: Path, tmp_path: Path) -> None:
    """With mmap=False the weights are the process's own: a file cut short, then deleted, changes nothing."""
    lines = """
        load().close()
        with load(runtime_options={"mmap": False}) as model:
            session = model.session(512)
            expected = bits(session)
            os.truncate(tile_file(), 0)
            print(bits(session) == expected)
            maps = Path("/proc/self/maps")
            print(maps.exists() and str(tile_file()) in maps.read_text())
            tile_file().unlink()
            print(bits(session) == expected)
        """
    assert succeeds(path, tmp_path, lines) == "True\nFalse\nTrue\n"
