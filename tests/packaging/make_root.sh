#!/usr/bin/env bash
# Make a bare Debian root: Python, and no compiler. What is in it is unpacked, not configured: no package's scripts run,
# and it has no users but root. A root that is there already stays.
#
#   bash tests/packaging/make_root.sh x86_64|aarch64 FOLDER [PACKAGE...]
#
# Needs root, debootstrap and Debian's packages. Beside a root for another kind of processor than this machine's, an
# emulator is unpacked (FOLDER.emulator); nothing is installed here.
set -euo pipefail
declare -A names=([x86_64]=amd64 [aarch64]=arm64)
kind=$1 root=$2
shift 2
[ ! -e "$root/made" ] || exit 0
rm -rf "$root"
mkdir -p "$root"
packages=$(printf ',%s' python3 python3-venv python3-pip "$@")
debootstrap --arch="${names[$kind]}" --foreign --variant=minbase --include="${packages#,}" bookworm "$root" \
  >"$root.log" 2>&1 || { tail -5 "$root.log" >&2; exit 1; }
for package in "$root"/var/cache/apt/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink
done
if [ "$kind" != "$(uname -m)" ]; then
  rm -rf "$root.emulator"
  mkdir "$root.emulator"
  (cd "$root.emulator" && apt-get download -qq -o APT::Sandbox::User=root qemu-user-static)
  dpkg-deb -x "$root.emulator"/qemu-user-static_*.deb "$root.emulator"
  cp "$root.emulator/usr/bin/qemu-$kind-static" "$root.emulator/emulator"
  rm -r "$root.emulator"/{usr,qemu-user-static_*.deb}
fi
rm -rf "$root"/var/cache/apt/archives "$root/debootstrap" "$root/proc" # a link to /proc, until the second stage
mkdir "$root/proc"
touch "$root/made"
