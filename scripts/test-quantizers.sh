#!/bin/sh
# Tests quantized checkpoints, and ZeRO-3, with packages that are too large for `make setup`, in an
# environment of its own below .cache: gptqmodel (it compiles kernels), torchao, DeepSpeed.
#
#   sh scripts/test-quantizers.sh
#
# Needs uv, a C++ compiler, and gdsload built in place (`make setup`).
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
torch=$(.venv/bin/python -c 'import torch; print(torch.__version__.split("+")[0])')
python=$(.venv/bin/python -c 'import sys; print(sys.executable)')
where=.cache/quantizers
[ -x "$where/bin/python" ] || uv venv --quiet --python "$python" "$where"
uv pip install --quiet --python "$where/bin/python" transformers "torch==$torch" accelerate \
    safetensors psutil click tqdm pytest compressed-tensors bitsandbytes torchao optimum \
    deepspeed setuptools wheel numpy ninja gguf
BUILD_CUDA_EXT=0 uv pip install --quiet --python "$where/bin/python" --no-build-isolation gptqmodel
PYTHONPATH="$PWD/src:$PWD/tests" "$where/bin/python" -m pytest -q -rs -p no:cacheprovider \
    tests/integrations/test_model_quantized.py tests/integrations/test_stock_weights.py
