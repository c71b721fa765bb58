#!/bin/sh
# Fuzzes with atheris, in an environment of its own below .cache; arguments as for fuzz.py. Ends with
# 75 if atheris cannot be installed here: it has no wheel, or the registry does not answer.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
where=.cache/fuzz/env

unavailable() {
    printf 'fuzz: skipped: atheris cannot be installed, see above\n' >&2
    exit 75
}

# atheris has wheels for these versions only.
[ -x "$where/bin/python" ] || uv venv --quiet --python '>=3.11,<3.13' "$where" || unavailable
uv pip install --quiet --python "$where/bin/python" --only-binary atheris \
    atheris click numpy psutil safetensors tqdm || unavailable
PYTHONPATH="$PWD/src" exec "$where/bin/python" scripts/fuzz.py "$@"
