#!/bin/sh
# Fuzzes with atheris, in an environment of its own below .cache; arguments as for fuzz.py.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
where=.cache/fuzz/env
# atheris has wheels for these versions only.
[ -x "$where/bin/python" ] || uv venv --quiet --python '>=3.11,<3.13' "$where"
uv pip install --quiet --python "$where/bin/python" atheris click numpy psutil safetensors tqdm
PYTHONPATH="$PWD/src" exec "$where/bin/python" scripts/fuzz.py "$@"
