#!/usr/bin/env bash
# Build an aarch64 wheel of edgedec, install it in a Debian arm64 root, and use it there, on an emulated processor.
#
#   sudo env "PATH=$PATH" bash benchmarks/packaging/aarch64_root.sh FOLDER
#
# Needs root, a network, and 1.5 GB in FOLDER; Debian or Ubuntu with debootstrap, g++-aarch64-linux-gnu, cmake and curl
# (apt-get install); Linux 6.7 or newer; on the PATH a Python with edgedec, pip and smollm2-135m of this machine, whose
# texts those of the root are compared with. A second run keeps emulator and root. tests/packaging/run.sh is the short
# form of this, for each kind of processor.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mkdir -p "$1" && cd "$1" && pwd)
root=$work/root
prompt="Why is the sky blue?"
step() { printf '\n=== %s (%ss)\n' "$1" "$SECONDS"; }
for tool in debootstrap aarch64-linux-gnu-g++ dpkg-deb unshare edgedec python; do
  command -v "$tool" >/dev/null || { echo "$tool is missing; the head of this script says what is needed" >&2; exit 1; }
done

in_root() { bash tests/packaging/in_root.sh "$root" "$@"; }

generated() { # generated WHERE...: the text of 16 tokens, of in_root or of this machine (env)
  "$@" edgedec run smollm2-135m --offline --runtime cpu -t 0 --max-tokens 16 --draft off --json "$prompt" \
    2>>"$work/run.log" | python -c "import json, sys; print(json.load(sys.stdin)['text'])"
}
same() { # same WHAT EXPECTED FOUND
  [ -n "$2" ] && [ "$2" = "$3" ] || { printf '%s: %s\nexpected: %s\n' "$1" "$3" "$2" >&2; exit 1; }
  echo "$1: the same text"
}

step "a Debian root for arm64 and an emulator, unpacked"
bash tests/packaging/make_root.sh aarch64 "$root" curl
"$root.emulator/emulator" --version | head -1
in_root python3 -c 'import platform; print(platform.platform())'

step "a wheel for aarch64, and those it depends on"
bash tests/packaging/build.sh "$work/dist" aarch64
rm -rf "$root/srv/wheels"
mkdir -p "$root/srv/wheels"
bash tests/packaging/fetch.sh "$work"/dist/edgedec_llm-*_aarch64.whl "$root/srv/wheels"
(cd "$root/srv/wheels" && ls edgedec* numpy* onnxruntime*)

step "installed as apps/raspberry_pi/README.md says, from these wheels"
rm -rf "$root/opt/edgedec"
in_root /usr/bin/python3 -m venv --without-pip /opt/edgedec
in_root /usr/bin/python3 -m pip -q --python /opt/edgedec/bin/python install --no-compile --no-index \
  --find-links /srv/wheels edgedec-llm
models=$(python -c "from edgedec_models.folders import models_folder; print(models_folder())")
mkdir -p "$root/var/lib/edgedec/models"
cp "$models"/smollm2-135m.gguf* "$root/var/lib/edgedec/models/"

step "edgedec doctor"
in_root edgedec doctor --all 2>/dev/null | tee "$work/doctor.txt" | grep -E "^python|^  (cpu|llamacpp|onnx) "
grep -q "instruction sets: i8mm, neon, portable" "$work/doctor.txt"
in_root QEMU_CPU=cortex-a72 edgedec doctor --all 2>/dev/null | grep -q "instruction sets: portable"
echo "a Cortex-A72 (Raspberry Pi 4) has no dot products: the portable kernels"

step "edgedec plan"
in_root edgedec plan smollm2-135m --memory 900MB 2>/dev/null | grep -E "^  (interpreter|total|allowed)|^changed to fit"

step "edgedec run"
neon=$(generated in_root EDGEDEC_CPU_ISA=neon)
echo "neon: $neon"
same "i8mm" "$neon" "$(generated in_root)"
same "neon on a Cortex-A76 with 16 KiB pages (Raspberry Pi 5)" "$neon" \
  "$(generated in_root QEMU_CPU=cortex-a76 QEMU_PAGESIZE=16384)"
same "the portable kernels on a Cortex-A72, and here" "$(generated env EDGEDEC_CPU_ISA=portable)" \
  "$(generated in_root QEMU_CPU=cortex-a72)"

step "the Raspberry Pi's service, its kiosk's wait, and one request, with 16 KiB pages"
cp apps/raspberry_pi/kiosk.sh "$root/srv/"
command=$(sed -n 's/^ExecStart=//p' apps/raspberry_pi/edgedec.service)
command=${command//'${MODEL}'/smollm2-135m}
command=${command//'${MEMORY}'/900MB}
cat >"$root/srv/serve.sh" <<SH
set -eu
$command &
server=\$!
BROWSER=true bash /srv/kiosk.sh "http://127.0.0.1:\$EDGEDEC_PORT" >&2
curl -sS --fail -H 'content-type: application/json' -d '{"model": "smollm2-135m", "temperature": 0, "max_tokens": 16,
  "messages": [{"role": "user", "content": "$prompt"}]}' "http://127.0.0.1:\$EDGEDEC_PORT/v1/chat/completions"
kill -TERM \$server
wait \$server
SH
answer=$(in_root QEMU_PAGESIZE=16384 EDGEDEC_PORT="${EDGEDEC_PORT:-18437}" bash /srv/serve.sh)
same "the server's answer" "$neon" "$(python -c "import json, sys
print(json.loads(sys.argv[1])['choices'][0]['message']['content'])" "$answer")"

step "done"
