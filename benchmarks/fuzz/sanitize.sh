#!/usr/bin/env bash
# Runs the cpu runtime's tests on tiny models, and the native tests of threads, against builds with sanitizers; anything
# that they find ends it.
#
#   bash benchmarks/fuzz/sanitize.sh [address|thread|all] [DIRECTORY]     builds in DIRECTORY (default: a temporary one)
#
# Needs GCC with its sanitizers, CMake, and a Python with edgedec and pytest (PYTHON, default: python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
work=${2:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work"
compiler=${CXX:-g++}
# The portable kernels are checked by test_logits.py alone, as they take minutes here.
# Processes that a test forks, or starts beside a sanitizer, and what it measures of itself are no matter here.
tests=(tests/runtimes/cpu/tiles/test_tiles.py tests/runtimes/cpu/test_logits.py tests/runtimes/cpu/test_invariance.py tests/runtimes/cpu/test_runtime.py tests/runtimes/cpu/test_native_library.py tests/runtimes/cpu/test_kv_types.py tests/runtimes/cpu/tiles/test_streaming.py tests/runtimes/cpu/heads/test_draft_head.py tests/runtimes/cpu/heads/test_block_head.py tests/runtimes/cpu/heads/test_head_beside.py)
chosen=(-m "not model" -k "not forked and not conform and not llamacpp and not prefill_in_several and not portable" -p no:cacheprovider)

check() { # check NAME FLAGS RUNTIME OPTIONS...: the library built with -fsanitize=FLAGS, and RUNTIME preloaded
  local name=$1 flags=$2 runtime=$3
  shift 3
  printf '=== %s\n' "$name"
  # With more optimization than this, undefined-behaviour checks take many minutes to compile.
  local options="-O1 -fsanitize=$flags -fno-sanitize-recover=all -fno-omit-frame-pointer -g1"
  if ! { cmake -S . -B "$work/$name" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_FLAGS="$options" && cmake --build "$work/$name"; } >"$work/$name.log" 2>&1; then
    cat "$work/$name.log"
    return 1
  fi
  rm -f "$work/$name".found.*
  # Pieces of late threads are taken over here, which whole forwards do not do under ThreadSanitizer (native/forward/run.h).
  if ! { cmake -S tests/native -B "$work/$name-threads" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_FLAGS="$options" && cmake --build "$work/$name-threads" --target threads_test; } >"$work/$name.log" 2>&1; then
    cat "$work/$name.log"
    return 1
  fi
  if ! env "$@" setarch "$(uname -m)" -R "$work/$name-threads/threads_test"; then
    cat "$work/$name".found.* || true
    return 1
  fi
  # Without randomized addresses: some kernels spread them too far for the sanitizers. What they find goes to files, as
  # pytest keeps what a process writes before it is ended.
  if ! env "$@" EDGEDEC_CPU_LIBRARY="$work/$name/runtimes/edgedec_runtimes/cpu/native/libedgedec_cpu.so" \
    LD_PRELOAD="$("$compiler" -print-file-name="$runtime") $("$compiler" -print-file-name=libstdc++.so)" \
    setarch "$(uname -m)" -R "$python" -m pytest -q "${tests[@]}" "${chosen[@]}"; then
    cat "$work/$name".found.* || true
    return 1
  fi
}

kind=${1:-all}
if [ "$kind" != thread ]; then
  # Python itself leaves memory behind at its end.
  found=log_path=$work/address.found
  check address address,undefined,float-cast-overflow libasan.so \
    "ASAN_OPTIONS=detect_leaks=0:$found" "UBSAN_OPTIONS=print_stacktrace=1:$found"
fi
if [ "$kind" != address ]; then
  check thread thread libtsan.so "TSAN_OPTIONS=halt_on_error=1:exitcode=66:log_path=$work/thread.found"
fi
echo "no findings"
