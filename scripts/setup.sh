#!/usr/bin/env bash
# Sets up everything strop needs, from a bare clone, and does nothing where nothing changed.
#   system packages -> .venv -> locked Python packages -> strop itself
# PYTHON=/path/to/python chooses the interpreter. PIP_ARGS is given to pip install.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

install_or_tell() { # install_or_tell PACKAGE... : installs as root, else prints the exact command and stops
  if ! command -v apt-get >/dev/null; then
    fail "missing: $*. Install these with your system's package manager, then run make again."
  fi
  if [ "$(id -u)" != 0 ]; then
    fail "missing: $*. Run: sudo apt-get install -y $*   then run make again."
  fi
  say "installing $*"
  apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { apt-get update >/dev/null && apt-get install -y --no-install-recommends "$@" >/dev/null; } ||
    fail "apt-get install -y $* failed; run it by hand to see why."
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "strop needs Python 3.11 or newer; found: $("${PYTHON:-python3}" --version 2>/dev/null || echo none). Install one, or run make with PYTHON=/path/to/python3.11."
}

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
if ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then missing+=(gcc libc6-dev); fi
[ "${#missing[@]}" = 0 ] || install_or_tell "${missing[@]}"

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  python="$(find_python)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    install_or_tell "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi

# The stamp holds what was installed, so that a changed lock file, and only that, installs again.
wanted="$(cat requirements.lock pyproject.toml | cksum) $(pwd)"
stamp=.venv/.strop-setup
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "installing locked packages (about 1.5 GB on disk)"
  # shellcheck disable=SC2086
  .venv/bin/python -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} -r requirements.lock
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
  printf '%s' "$wanted" >"$stamp"
fi
