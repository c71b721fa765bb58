#!/bin/sh
# Makes .cache/bench/peers, the environment of the loaders that the benchmarks compare with.
#
#   sh benchmarks/deps.sh
#
# A second run does nothing. What cannot be installed is said, and its arms are left out.
set -eu
cd "$(dirname "$0")/.."
here=.cache/bench/peers
wanted=benchmarks/requirements-peers.txt

say() { printf 'bench-deps: %s\n' "$*"; }

if [ -f "$here/stamp" ] && cmp -s "$wanted" "$here/stamp"; then exit 0; fi
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
done
uv=
for candidate in uv .venv/bin/uv .cache/uv/bin/uv; do
    if "$candidate" --version >/dev/null 2>&1; then uv=$candidate && break; fi
done
python=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
install() { # requirement...
    if [ -n "$uv" ]; then
        "$uv" pip install -q --python "$here/bin/python" "$@"
    else
        "$here/bin/python" -m pip install -q "$@"
    fi
}

say "making $here (torch again: some minutes without uv, or the first time)"
rm -rf "$here"
mkdir -p "$(dirname "$here")"
if [ -n "$uv" ]; then "$uv" venv -q --python "$python" "$here"; else "$python" -m venv "$here"; fi
if install -r "$wanted"; then
    cp "$wanted" "$here/stamp"
else
    say "not all of it fits this machine: one by one"
    grep -v '^#' "$wanted" | while read -r requirement; do
        install "$requirement" || say "left out: $requirement"
    done
fi
command -v fio >/dev/null 2>&1 || say "fio is not installed: its arm will be left out"
say "done"
