#!/usr/bin/env bash
# Run a command in a root of make_root.sh, in namespaces of its own: what it starts ends with it.
#
#   bash tests/packaging/in_root.sh ROOT [NAME=VALUE...] COMMAND...
#
# Needs root; with an emulator, Linux 6.7 or newer. The kernel knows the emulator in the namespace only: nothing is
# registered on this machine. The command has PATH, HOME and EDGEDEC_CACHE of the root, and no variable of this machine.
set -euo pipefail

if [ "${1-}" = --inside ]; then # in the namespaces
  root=$2
  shift 2
  if [ -x "$root.emulator/emulator" ]; then
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    # A name, magic and mask of an ELF file for aarch64, and the emulator; F opens it now, where it is.
    printf '%s%s%s' ':aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:' \
      '\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' "$root.emulator/emulator:F" \
      >/proc/sys/fs/binfmt_misc/register
  fi
  mount -t proc proc "$root/proc"
  # /sys would tell of this machine's processor, which onnxruntime for arm64 does not survive. No exec: what crashes as
  # the first process of a namespace would hang, as it takes no signal.
  chroot "$root" /usr/bin/env -i PATH=/opt/edgedec/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    EDGEDEC_CACHE=/var/lib/edgedec "$@"
  exit
fi

root=$(realpath "$1")
shift
go=$(mktemp -u)
mkfifo "$go"
trap 'rm -f "$go"' EXIT
# The user ids are mapped from outside, so the shell waits for that before it becomes the namespace's root.
unshare --user --mount --pid --fork --kill-child bash -c 'read -r _ <"$0"; exec bash "$@"' \
  "$go" "$0" --inside "$root" "$@" <&0 &
child=$!
while [ "$(readlink "/proc/$child/ns/user")" = "$(readlink /proc/self/ns/user)" ]; do sleep 0.1; done
echo '0 0 65536' >"/proc/$child/uid_map"
echo '0 0 65536' >"/proc/$child/gid_map"
echo go >"$go"
status=0
wait "$child" || status=$?
exit $status
