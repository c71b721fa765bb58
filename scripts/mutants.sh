#!/bin/sh
# Mutation tests with mutmut: changes one expression of a function at a time, and runs the tests
# that call the function. The results are kept in .cache/mutants; remove it to start anew.
#
#     make mutants                                                  # all that have no result yet
#     make mutants ARGS='gdsload.planning.read_plan.*'              # these, again
#     sh scripts/mutants.sh --show gdsload.planning.read_plan.x_grouped__mutmut_3
#
# Modules and tests are in [tool.mutmut] of pyproject.toml.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/uv.sh
. scripts/uv.sh
command -v uv >/dev/null || { printf 'uv is not installed: pip install uv\n' >&2; exit 1; }
where=$PWD/.cache/mutants
if [ ! -x "$where/site/bin/mutmut" ]; then
    uv pip install --quiet --python .venv/bin/python --target "$where/site" mutmut==3.8.1
fi
export PYTHONPATH="$where/site" OMP_NUM_THREADS=1
mkdir -p "$where/tree"
cp -au src tests pyproject.toml "$where/tree"
cd "$where/tree"
if [ "${1:-}" = --show ]; then
    exec "$where/site/bin/mutmut" show "$2"
fi
# mutmut leaves functions with decorators as they are. This one changes no result.
grep -rl '^ *@collector_paused()$' src/gdsload | xargs -r sed -i '/^ *@collector_paused()$/d'
# mutmut sets a context variable in each function that it changes. CPython 3.11 crashes if the garbage
# collector runs such a function, a finalizer, while it sets the variable.
conftest=tests/conftest.py
grep -q '^gc.disable()$' "$conftest" || printf '\ngc.disable()\n' >>"$conftest"
"$where/site/bin/mutmut" run --max-children "${MUTANTS_PROCESSES:-2}" "$@"
"$where/site/bin/mutmut" results
