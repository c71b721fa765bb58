#!/bin/sh
# Tests loads from real servers of object stores on loopback: S3 (versitygw), Google Cloud Storage
# (fake-gcs-server) and Azure (Azurite). They are built once, in .cache/remote: 5 minutes on 2 cores.
#
#   sh scripts/test-remote.sh [argument of pytest ...]
#
# Needs Go, npm, and gdsload built in place (`make setup`). Ends with 75 if a server cannot be built
# here: a tool is missing, or a registry does not answer.
set -eu
cd "$(dirname "$0")/.."
where=$PWD/.cache/remote
limit=400 # seconds, of each build
s3=github.com/versity/versitygw/cmd/versitygw@v1.8.0
gs=github.com/fsouza/fake-gcs-server@v1.56.1
az=azurite@3.37.0
wanted="$s3 $gs $az"

unavailable() {
    printf 'test-remote: skipped: %s\n' "$1" >&2
    exit 75
}

build() { # what, registry, command ...
    what=$1 registry=$2
    shift 2
    printf 'test-remote: building %s in %s\n' "$what" "$where"
    code=0
    timeout --foreground -k 10 "$limit" "$@" || code=$?
    case $code in
        0) ;;
        124 | 137) unavailable "$what was not built in $limit s (registry: $registry)" ;;
        *) unavailable "$what cannot be built, see above (registry: $registry)" ;;
    esac
}

for tool in go npm; do
    command -v $tool >/dev/null || unavailable "$tool is not installed"
done
if [ "$(cat "$where/stamp" 2>/dev/null)" != "$wanted" ]; then
    mkdir -p "$where/bin"
    for module in $s3 $gs; do
        build "$module" "$(go env GOPROXY)" env GOBIN="$where/bin" go install "$module"
    done
    build "$az" "$(npm config get registry 2>/dev/null)" npm install --no-audit --no-fund --loglevel=error \
        --no-save --prefix "$where" "$az"
    printf '%s\n' "$wanted" >"$where/stamp"
fi
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY # none leads to loopback
exec .venv/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . \
    scripts/remote_check.py "$@"
