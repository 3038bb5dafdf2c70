#!/usr/bin/env bash
# Makes build/venv-answers, an environment of its own with the packages that make tasks answered by a text, and does nothing where it is
# there already. It has strop's own Python: boxes judge answers with it.
# PIP_ARGS is given to pip install.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv-answers
packages=("reasoning-gym==0.1.25" "verifiers==0.4.0")
wanted="${packages[*]}"
stamp="$venv/.strop-setup"
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

printf 'setup: installing %s into %s (about 1 GB)\n' "$wanted" "$venv" >&2
mkdir -p build
.venv/bin/python -m venv --clear "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "${packages[@]}"
"$venv/bin/python" -c 'import reasoning_gym, verifiers.v1' >/dev/null
printf '%s' "$wanted" >"$stamp"
