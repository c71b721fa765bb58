#!/bin/sh
# Tests loads from real servers of object stores on loopback: S3 (versitygw), Google Cloud Storage
# (fake-gcs-server) and Azure (Azurite). They are built once, in .cache/remote: 5 minutes on 2 cores.
#
#   sh scripts/test-remote.sh [argument of pytest ...]
#
# Needs Go, npm, and gdsload built in place (`make setup`).
set -eu
cd "$(dirname "$0")/.."
where=$PWD/.cache/remote
s3=github.com/versity/versitygw/cmd/versitygw@v1.8.0
gs=github.com/fsouza/fake-gcs-server@v1.56.1
az=azurite@3.37.0
wanted="$s3 $gs $az"

for tool in go npm; do
    command -v $tool >/dev/null || { printf '%s is not installed\n' $tool >&2; exit 1; }
done
if [ "$(cat "$where/stamp" 2>/dev/null)" != "$wanted" ]; then
    printf 'building the servers in %s\n' "$where"
    mkdir -p "$where/bin"
    for module in $s3 $gs; do GOBIN=$where/bin nice -n 19 go install "$module"; done
    nice -n 19 npm install --silent --no-save --prefix "$where" "$az"
    printf '%s\n' "$wanted" >"$where/stamp"
fi
exec .venv/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . \
    scripts/remote_check.py "$@"
