#!/usr/bin/env bash
# Makes build/venv-harbor, an environment of its own with Harbor, and does nothing where it is there already.
# It can't be ours: Harbor needs Python 3.12 and other versions of what it shares with us.
# PYTHON_HARBOR=/path/to/python chooses the interpreter. PIP_ARGS is given to pip install.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv-harbor
packages=("harbor==0.26.0")
wanted="${packages[*]}"
stamp="$venv/.strop-setup"
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

find_python() {
  local candidate root
  root="$(command -v pyenv >/dev/null && pyenv root || true)"
  for candidate in ${PYTHON_HARBOR:-python3.14 python3.13 python3.12 python3 "$root"/versions/3.1[2-9]*/bin/python}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  printf 'error: Harbor needs Python 3.12 or newer; none found. Install one, or set PYTHON_HARBOR=/path/to/python3.12.\n' >&2
  exit 1
}

python="$(find_python)"
printf 'setup: installing %s into %s (about 0.5 GB)\n' "$wanted" "$venv" >&2
mkdir -p build
"$python" -m venv --clear "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "${packages[@]}"
"$venv/bin/python" -c 'from harbor.lint.task import lint_task; from harbor.models.task.task import Task' >/dev/null
printf '%s' "$wanted" >"$stamp"
