# shellcheck shell=sh
# Sourced by the scripts that install packages: where uv is, and what it is to be told.
PATH=$PATH:$PWD/.venv/bin:$PWD/.cache/uv/bin
# uv reads neither pip's settings nor the system's certificates: whoever set them up meant both.
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
for bundle in "${PIP_CERT:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
done
