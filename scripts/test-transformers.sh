#!/bin/sh
# Tests the integration with several versions of transformers, each in an environment of its own
# below .cache.
#
#   sh scripts/test-transformers.sh [version ...]
#
# Without versions: the oldest supported one and some newer ones, but not the newest, which
# `make test` covers. Needs uv, and gdsload built in place (`make setup`).
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
torch=$(.venv/bin/python -c 'import torch; print(torch.__version__.split("+")[0])')
python=$(.venv/bin/python -c 'import sys; print(sys.executable)')
failed=""
[ $# -gt 0 ] || set -- 4.57.6 5.0.0 5.2.0 5.4.0 5.8.1 5.15.1
for version in "$@"; do
    where=.cache/transformers-$version
    [ -x "$where/bin/python" ] || uv venv --quiet --python "$python" "$where"
    tqdm=tqdm
    [ "$version" != 4.57.6 ] || tqdm=tqdm==4.58.0  # the oldest of both
    uv pip install --quiet --python "$where/bin/python" "transformers==$version" "torch==$torch" \
        accelerate safetensors psutil click "$tqdm" pytest pytest-xdist hypothesis
    printf 'transformers %s\n' "$version"
    PYTHONPATH="$PWD/src:$PWD/tests" "$where/bin/python" -m pytest -q -p no:cacheprovider \
        -n 3 --dist loadfile --no-loadscope-reorder \
        --ignore tests/integrations/test_async_model.py \
        --ignore tests/integrations/test_module_callbacks.py \
        --ignore tests/integrations/test_prefetch_model.py tests/integrations || failed="$failed $version"
done
[ -z "$failed" ] || { printf 'failed:%s\n' "$failed" >&2; exit 1; }
