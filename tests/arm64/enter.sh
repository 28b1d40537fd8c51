#!/usr/bin/env bash
# enter.sh FOLDER COMMAND...: runs a command in the system that make_system.sh made, in this repository, which is
# /edge-run there, and cannot be written to but for what an installation leaves. Mounts end with the command.
set -euo pipefail
root=$(cd "$1" && pwd)/root repository=$(cd "$(dirname "$0")/../.." && pwd)
shift
exec unshare --mount --propagation private bash -euc '
    root=$1 repository=$2; shift 2
    for place in proc sys dev tmp; do mkdir -p "$root/$place"; done
    mount --rbind /proc "$root/proc"; mount --rbind /sys "$root/sys"; mount --rbind /dev "$root/dev"
    mkdir -p "$root/edge-run"; mount --bind "$repository" "$root/edge-run"
    cd "$root"
    exec chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PATH=/opt/edge-run/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        PYTHONPYCACHEPREFIX=/var/cache/bytecode QEMU_PAGESIZE="${QEMU_PAGESIZE:-4096}" \
        sh -c "cd /edge-run && exec \"\$@\"" sh "$@"
' bash "$root" "$repository" "$@"
