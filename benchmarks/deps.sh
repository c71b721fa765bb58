#!/bin/sh
# Creates environments for the loaders that the benchmarks compare with, in DIRECTORY:
#
#   sh benchmarks/deps.sh [DIRECTORY [PYTHON [WHEELS]]]      (.cache/bench, .venv/bin/python)
#
# With WHEELS, a directory of wheels, nothing is downloaded: these wheels are installed, and
# everything else (torch!) is taken from the environment of PYTHON.
#
#   peers      requirements-peers.txt
#   prefetch   requirements-prefetch.txt: needs another safetensors, and a GPU; without one, nothing
#
# A second run does nothing. Packages that cannot be installed are reported, and their arms left out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
directory=${1:-$here/../.cache/bench}
python=${2:-$here/../.venv/bin/python}
wheels=${3:-}

say() { printf 'bench-deps: %s\n' "$*"; }

[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
done
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT
caches=${XDG_CACHE_HOME:-${HOME:-}/.cache}
[ -e "$caches" ] || caches=${HOME:-/}
if [ ! -w "$caches" ] || { [ -e "$caches/uv" ] && [ ! -w "$caches/uv" ]; }; then
    export UV_CACHE_DIR="${UV_CACHE_DIR:-$directory/uv-cache}"
    export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$directory/pip-cache}"
fi
uv=
for candidate in uv "$(dirname "$python")/uv" "$here/../.cache/uv/bin/uv"; do
    if "$candidate" --version >/dev/null 2>&1; then uv=$candidate && break; fi
done
base=$("$python" -c 'import sys; print(sys._base_executable)')

install() { # environment requirement...
    into=$1/bin/python
    shift
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$into" "$@"
    else
        "$into" -m pip install -q "$@"
    fi
}

purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

install_wheel() { # python requirement
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$1" --no-index --no-deps --find-links "$wheels" "$2"
    else
        "$python" -m pip --python "$1" install -q --no-index --no-deps --find-links "$wheels" "$2"
    fi
}

make_from_wheels() { # name
    env=$directory/$1
    wanted=$here/requirements-$1.txt
    say "making $env of what is in $wheels"
    rm -rf "$env"
    mkdir -p "$directory"
    "$python" -m venv --without-pip "$env"
    # A venv of a venv sees what the system has, not what its parent has.
    purelib "$python" >"$(purelib "$env/bin/python")/parent.pth"
    grep -v '^#' "$wanted" | while read -r requirement; do
        install_wheel "$env/bin/python" "$requirement" >/dev/null 2>&1 ||
            say "no wheel: $requirement"
    done
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
        if ! "$env/bin/python" -c 'import importlib.util as u; exit(u.find_spec("torch") is None)'; then
            say "no torch: no loader can run in $env, which is made again next time"
            return
        fi
    fi
    cp "$wanted" "$env/stamp"
}

if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || { say "$wheels: there is no such directory" && exit 2; }
    make_from_wheels peers
    make_from_wheels prefetch
    exit 0
fi
make_environment peers
if command -v nvidia-smi >/dev/null 2>&1; then make_environment prefetch; fi
command -v fio >/dev/null 2>&1 || say "fio is not installed: its arm will be left out"
say "done"
