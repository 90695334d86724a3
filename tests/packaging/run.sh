#!/usr/bin/env bash
# Install each wheel of build.sh in a bare Debian root, as a person would, and have it answer there.
#
#   bash tests/packaging/run.sh FOLDER [ROOTS]    the roots stay in ROOTS (default: a temporary folder)
#
# Needs what make_root.sh and in_root.sh need, and smollm2-135m in the cache (edgedec pull smollm2-135m); says so and
# ends well where this machine can't make a root. A root has no compiler, and nothing in it uses the network. The texts of
# all kinds must be equal, with the kernels that all have.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$1" && pwd)
roots=${2:-}
[ -n "$roots" ] || { roots=$(mktemp -d) && trap 'rm -rf "$roots"' EXIT; }
roots=$(mkdir -p "$roots" && cd "$roots" && pwd)
models=${EDGEDEC_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/edgedec}/models

skip() { echo "wheels in bare roots: skipped, $1"; exit 0; }
[ "$(id -u)" = 0 ] || skip "only root makes one"
command -v debootstrap >/dev/null || skip "there is no debootstrap (apt-get install debootstrap)"
[ -e "$models/smollm2-135m.gguf" ] || skip "$models has no smollm2-135m.gguf (edgedec pull smollm2-135m)"
unshare --user --mount --pid --fork true 2>/dev/null || skip "this system allows no user namespaces"

expected=
for wheel in "$folder"/edgedec_llm-*.whl; do
  [[ $wheel =~ _(x86_64|aarch64)\.whl$ ]] || continue
  kind=${BASH_REMATCH[1]}
  if [ "$kind" != "$(uname -m)" ] && [ "$kind" != aarch64 ]; then
    echo "$kind: not tried, as the emulator is for aarch64 only"
    continue
  fi
  bash "$here/make_root.sh" "$kind" "$roots/$kind"
  in_root() { bash "$here/in_root.sh" "$roots/$kind" "$@"; }
  in_root sh -c '! command -v cc c++ gcc g++ clang make cmake' || { echo "$kind: the root has a compiler" >&2; exit 1; }
  rm -rf "$roots/$kind"/{srv/wheels,opt/edgedec,var/lib/edgedec}
  mkdir -p "$roots/$kind/srv/wheels" "$roots/$kind/var/lib/edgedec/models"
  bash "$here/fetch.sh" "$wheel" "$roots/$kind/srv/wheels"
  cp "$models"/smollm2-135m.gguf* "$roots/$kind/var/lib/edgedec/models/"

  begun=$SECONDS
  in_root /usr/bin/python3 -m venv --without-pip /opt/edgedec
  in_root /usr/bin/python3 -m pip -q --python /opt/edgedec/bin/python install --no-compile --no-index \
    --find-links /srv/wheels edgedec-llm
  text=$(in_root EDGEDEC_CPU_ISA=portable edgedec run smollm2-135m --offline --quiet -t 0 --max-tokens 8 \
    "Why is the sky blue?" 2>"$roots/$kind.log") || { cat "$roots/$kind.log" >&2; exit 1; }
  echo "$kind: $(basename "$wheel") installed without a compiler, and answered, in $((SECONDS - begun)) s: $text"
  [ -n "$text" ] && [ "$text" = "${expected:=$text}" ] || { echo "$kind: expected: $expected" >&2; exit 1; }
done
[ -n "$expected" ] || { echo "$folder has no wheel for $(uname -m) or aarch64" >&2; exit 1; }
