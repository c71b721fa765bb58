# shellcheck shell=sh
# Sourced by the scripts that install packages: finds uv and sets its environment.
PATH=$PATH:$PWD/.venv/bin:$PWD/.cache/uv/bin
# uv reads neither pip's settings nor the system's certificates: pass them on.
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
done
caches=${XDG_CACHE_HOME:-${HOME:-}/.cache}
[ -e "$caches" ] || caches=${HOME:-/}
if [ ! -w "$caches" ] || { [ -e "$caches/uv" ] && [ ! -w "$caches/uv" ]; }; then
    export UV_CACHE_DIR="${UV_CACHE_DIR:-$PWD/.cache/uv-cache}"
    export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$PWD/.cache/pip-cache}"
fi
