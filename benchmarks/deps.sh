#!/bin/sh
# Makes the environments of the loaders that the benchmarks compare with, in DIRECTORY:
#
#   sh benchmarks/deps.sh [DIRECTORY [PYTHON]]      (.cache/bench, .venv/bin/python)
#
#   peers      requirements-peers.txt
#   prefetch   requirements-prefetch.txt: needs another safetensors, and a GPU; without one, nothing
#
# A second run does nothing. What cannot be installed is said, and its arms are left out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
directory=${1:-$here/../.cache/bench}
python=${2:-$here/../.venv/bin/python}

say() { printf 'bench-deps: %s\n' "$*"; }

[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
done
uv=
for candidate in uv "$(dirname "$python")/uv" "$here/../.cache/uv/bin/uv"; do
    if "$candidate" --version >/dev/null 2>&1; then uv=$candidate && break; fi
done
base=$("$python" -c 'import sys; print(sys._base_executable)')

install() { # environment requirement...
    into=$1/bin/python
    shift
    if [ -n "$uv" ]; then
        "$uv" pip install -q --prerelease=allow --python "$into" "$@"
    else
        "$into" -m pip install -q "$@"
    fi
}

make_environment() { # name
    env=$directory/$1
    wanted=$here/requirements-$1.txt
    if [ -f "$env/stamp" ] && cmp -s "$wanted" "$env/stamp"; then return; fi
    say "making $env (torch again: some minutes without uv, or the first time)"
    rm -rf "$env"
    mkdir -p "$directory"
    if [ -n "$uv" ]; then "$uv" venv -q --python "$base" "$env"; else "$base" -m venv "$env"; fi
    if ! install "$env" -r "$wanted"; then
        say "not all of it fits this machine: one by one"
        grep -v '^#' "$wanted" | while read -r requirement; do
            install "$env" "$requirement" || say "left out: $requirement"
        done
    fi
    cp "$wanted" "$env/stamp"
}

make_environment peers
if command -v nvidia-smi >/dev/null 2>&1; then make_environment prefetch; fi
command -v fio >/dev/null 2>&1 || say "fio is not installed: its arm will be left out"
say "done"
