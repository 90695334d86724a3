#!/usr/bin/env bash
# Build an aarch64 wheel of edgedec, install it in a Debian arm64 root, and use it there, on an emulated processor.
#
#   sudo env "PATH=$PATH" bash benchmarks/aarch64_root.sh FOLDER
#
# Needs root, a network, and 1.5 GB in FOLDER; Debian or Ubuntu with debootstrap, g++-aarch64-linux-gnu, cmake and curl
# (apt-get install); Linux 6.7 or newer; on the PATH a Python with edgedec, pip and smollm2-135m of this machine, whose
# texts those of the root are compared with. A second run keeps emulator and root.
#
# The emulator is known to the kernel in a user namespace of its own only: nothing is registered or installed here. What
# is in the root is unpacked, not configured: no package's scripts run, and it has no users but root.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mkdir -p "$1" && cd "$1" && pwd)
root=$work/root
emulator=$work/emulator/usr/bin/qemu-aarch64-static
prompt="Why is the sky blue?"
step() { printf '\n=== %s (%ss)\n' "$1" "$SECONDS"; }
for tool in debootstrap aarch64-linux-gnu-g++ cmake dpkg-deb unshare edgedec python; do
  command -v "$tool" >/dev/null || { echo "$tool is missing; the head of this script says what is needed" >&2; exit 1; }
done

# Run by in_root in namespaces of their own. The line is a name, magic and mask of an ELF file for aarch64, and the
# emulator; F opens it now, where it is.
cat >"$work/inside.sh" <<'SH'
set -eu
root=$1 emulator=$2
shift 2
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s%s%s' ':aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:' \
  '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' "$emulator:F" \
  >/proc/sys/fs/binfmt_misc/register
mount -t proc proc "$root/proc"
# /sys would tell of this machine's processor, which onnxruntime for arm64 does not survive. No exec: what crashes as the
# first process of a namespace would hang, as it takes no signal.
chroot "$root" /usr/bin/env -i PATH=/opt/edgedec/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
  EDGEDEC_CACHE=/var/lib/edgedec "$@"
SH

in_root() { # in_root [NAME=VALUE...] COMMAND...: run it in the root; what it starts ends with it
  local go=$work/go.$BASHPID status=0
  rm -f "$go"
  mkfifo "$go"
  # The user ids are mapped from outside, so the shell waits for that before it becomes the namespace's root.
  unshare --user --mount --pid --fork --kill-child bash -c 'read -r _ <"$0"; exec bash "$@"' \
    "$go" "$work/inside.sh" "$root" "$emulator" "$@" <&0 &
  local child=$!
  while [ "$(readlink "/proc/$child/ns/user")" = "$(readlink /proc/self/ns/user)" ]; do sleep 0.1; done
  echo '0 0 65536' >"/proc/$child/uid_map"
  echo '0 0 65536' >"/proc/$child/gid_map"
  echo go >"$go"
  wait "$child" || status=$?
  rm -f "$go"
  return "$status"
}

generated() { # generated WHERE...: the text of 16 tokens, of in_root or of this machine (env)
  "$@" edgedec run smollm2-135m --offline --runtime cpu -t 0 --max-tokens 16 --draft off --json "$prompt" \
    2>>"$work/run.log" | python -c "import json, sys; print(json.load(sys.stdin)['text'])"
}
same() { # same WHAT EXPECTED FOUND
  [ -n "$2" ] && [ "$2" = "$3" ] || { printf '%s: %s\nexpected: %s\n' "$1" "$3" "$2" >&2; exit 1; }
  echo "$1: the same text"
}

step "an emulator, unpacked"
if [ ! -x "$emulator" ]; then
  (cd "$work" && apt-get download -qq -o APT::Sandbox::User=root qemu-user-static)
  dpkg-deb -x "$work"/qemu-user-static_*.deb "$work/emulator"
fi
"$emulator" --version | head -1

step "a Debian root for arm64, unpacked"
if [ ! -x "$root/usr/bin/python3" ]; then
  rm -rf "$root"
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3,python3-venv,python3-pip,curl \
    bookworm "$root" >"$work/debootstrap.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink
  done
  rm -rf "$root"/var/cache/apt/archives "$root/debootstrap" "$root/proc" # a link to /proc, until the second stage
  mkdir "$root/proc"
fi
in_root python3 -c 'import platform; print(platform.platform())'

step "a wheel for aarch64, and those it depends on"
rm -rf "$root/srv/wheels"
mkdir -p "$root/srv/wheels"
_PYTHON_HOST_PLATFORM=linux-aarch64 \
  CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++" \
  python -m pip wheel -q --no-deps --wheel-dir "$root/srv/wheels" .
wheel=$(cd "$root/srv/wheels" && echo edgedec_llm-*-linux_aarch64.whl)
# pip takes a platform by its name, not every older one with it.
platforms=$(printf -- '--platform=manylinux%s_aarch64 ' 2014 _2_17 _2_26 _2_27 _2_28 _2_31 _2_34)
# shellcheck disable=SC2086
python -m pip download -q $platforms --platform=linux_aarch64 --python-version 3.11 --only-binary=:all: \
  --dest "$root/srv/wheels" "$root/srv/wheels/$wheel[server]"
(cd "$root/srv/wheels" && ls edgedec* numpy* onnxruntime*)

step "installed as apps/raspberry_pi/README.md says, from these wheels"
rm -rf "$root/opt/edgedec"
in_root /usr/bin/python3 -m venv --without-pip /opt/edgedec
in_root /usr/bin/python3 -m pip -q --python /opt/edgedec/bin/python install --no-compile --no-index \
  --find-links /srv/wheels "edgedec-llm[server]"
models=$(python -c "from edgedec_models.folders import models_folder; print(models_folder())")
mkdir -p "$root/var/lib/edgedec/models"
cp "$models"/smollm2-135m.gguf* "$root/var/lib/edgedec/models/"

step "edgedec doctor"
in_root edgedec doctor 2>/dev/null | tee "$work/doctor.txt" | grep -E "^python|^  (cpu|llamacpp|onnx) "
grep -q "instruction sets: i8mm, neon, portable" "$work/doctor.txt"
in_root QEMU_CPU=cortex-a72 edgedec doctor 2>/dev/null | grep -q "instruction sets: portable"
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
