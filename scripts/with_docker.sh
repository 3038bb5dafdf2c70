#!/usr/bin/env bash
# Runs a command with a docker daemon of its own, then stops the daemon and removes all that it made. As root.
#   scripts/with_docker.sh COMMAND...
# The daemon listens on a unix socket in a temporary directory (DOCKER_HOST for the command) and touches no network of the machine. The
# default image is imported from a root file system made on the spot; nothing is pulled.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'docker: %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

[ "$#" -gt 0 ] || fail "usage: scripts/with_docker.sh COMMAND..."
[ "$(id -u)" = 0 ] || fail "a docker daemon of one's own needs root; run this as root."
PATH="$PATH:/usr/sbin:/sbin"
if ! command -v dockerd >/dev/null; then
  command -v apt-get >/dev/null || fail "dockerd isn't installed; install Docker with your system's package manager, then run this again."
  say "installing docker.io"
  apt-get install -y --no-install-recommends docker.io >/dev/null 2>&1 ||
    { apt-get update >/dev/null && apt-get install -y --no-install-recommends docker.io >/dev/null; } ||
    fail "apt-get install -y docker.io failed; run it by hand to see why."
fi

home="$(mktemp -d "${TMPDIR:-/tmp}/strop-dockerd.XXXXXX")"
daemon=
finish() {
  if [ -n "$daemon" ]; then
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  # What a killed daemon may have left mounted.
  awk -v home="$home/" 'index($5, home) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r place; do umount -l "$place" || true; done
  rm -rf "$home"
}
trap finish EXIT

dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$home/pid" --host "unix://$home/docker.sock" \
  --iptables=false --ip6tables=false --ip-forward=false --bridge=none --exec-opt native.cgroupdriver=cgroupfs >"$home/log" 2>&1 &
daemon=$!
export DOCKER_HOST="unix://$home/docker.sock"
for _ in $(seq 600); do
  kill -0 "$daemon" 2>/dev/null || { tail -n 5 "$home/log" >&2; fail "dockerd ended; its last words are above."; }
  .venv/bin/python -c 'import docker; docker.from_env().ping()' 2>/dev/null && break
  sleep 0.2
done
say "importing the image"
.venv/bin/python -m strop.sandboxes.docker.rootfs >/dev/null || fail "the image can't be made."
status=0
"$@" || status=$?
exit "$status"
