#!/usr/bin/env bash
# Builds the native tests and runs them: for this processor, for Windows under wine where both are there, and for 64-bit
# Arm with an emulator where there is one.
#
#   bash tests/native/run.sh [DIRECTORY]     builds in DIRECTORY (default: a temporary one)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi

build() { # build DIRECTORY CMAKE-OPTIONS...
  local directory=$1
  shift
  if ! { cmake -S "$here" -B "$directory" -DCMAKE_BUILD_TYPE=Release "$@" &&
    cmake --build "$directory" --parallel 2 --target edgedec_cpu kernels_test threads_test; } >"$directory.log" 2>&1; then
    cat "$directory.log"
    return 1
  fi
}

mkdir -p "$work"
echo "kernels of this processor ($(uname -m))"
build "$work/here"
status=0
"$work/here/kernels_test" || status=1
"$work/here/threads_test" || status=1

[ "$(uname -m)" = aarch64 ] && exit $status
if [ "$(command -v x86_64-w64-mingw32-g++-posix wine | wc -l)" = 2 ]; then
  echo "kernels of this processor, as programs for Windows"
  build "$work/windows" -DCMAKE_TOOLCHAIN_FILE="$here/windows.cmake" -DEDGEDEC_COMPILES_AVXVNNI=OFF
  export WINEPREFIX="$work/wine" WINEDEBUG=-all WINEDLLOVERRIDES="mscoree=;mshtml=" # neither .NET nor a browser
  wine "$work/windows/threads_test.exe" </dev/null || status=1
  wine "$work/windows/kernels_test.exe" </dev/null || status=1
  bash "$here/../packaging/windows.sh" "$work/windows/native/edgedec_cpu.dll" "$work/python" || status=1
else
  echo "programs for Windows: skipped, there is no x86_64-w64-mingw32-g++-posix or no wine" \
    "(apt-get install g++-mingw-w64-x86-64-posix wine64 wine)"
fi
compiler=aarch64-linux-gnu-g++
emulator=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)
if ! command -v "$compiler" >/dev/null || [ -z "$emulator" ]; then
  echo "kernels of 64-bit Arm: skipped, there is no $compiler or no qemu-aarch64" \
    "(apt-get install g++-aarch64-linux-gnu qemu-user)"
  exit $status
fi
echo "kernels of 64-bit Arm, emulated"
build "$work/arm" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler"
emulated() { # emulated PROCESSOR [ARGUMENT]: kernels_test on one of the emulator's processors
  "$emulator" -L /usr/aarch64-linux-gnu -cpu "$1" "$work/arm/kernels_test" "${@:2}"
}
emulated max || status=1
# What is chosen at run time: a Cortex-A72 has no dot products, an A76 no i8mm; `max` has all that the emulator knows.
for expected in "max:i8mm neon portable" "cortex-a76:neon portable" "cortex-a72:portable"; do
  found=$(emulated "${expected%%:*}" sets | xargs)
  [ "$found" = "${expected#*:}" ] || { echo "instruction sets of $expected, but found: $found"; status=1; }
done
"$emulator" -L /usr/aarch64-linux-gnu -cpu max "$work/arm/threads_test" || status=1
exit $status
