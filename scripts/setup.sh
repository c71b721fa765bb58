#!/bin/sh
# Makes .venv: gdsload built in place, and everything its tests and its demo need.
#
#   sh scripts/setup.sh
#
# For a bare Debian or Ubuntu with Python 3.10+ and a C compiler, as root or not, without questions.
# Root installs missing system packages; other users unpack them below .cache, and nothing outside
# this directory is changed but the caches of uv and pip. A second run does nothing.
set -eu
cd "$(dirname "$0")/.."
here=$PWD
prefix=$here/.cache/prefix

say() { printf 'setup: %s\n' "$*"; }
die() {
    say "$@" >&2
    exit 1
}
is_root() { [ "$(id -u)" = 0 ]; }

# Compilers started here (and by the Makefile) find packages that were unpacked without root.
export CPATH="$prefix/include${CPATH:+:$CPATH}"
export LIBRARY_PATH="$prefix/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"

has_liburing() {
    # CC may have arguments ("ccache gcc"): split on purpose.
    # shellcheck disable=SC2086
    [ "${GDSLOAD_LIBURING:-}" != 0 ] &&
        printf '#include <liburing.h>\n' | ${CC:-cc} -E - >/dev/null 2>&1
}

# --- nothing to do? ---------------------------------------------------------------------------

stamp=.venv/gdsload.stamp
inputs() {
    find pyproject.toml setup.py scripts/setup.sh src/gdsload/_native -type f \
        \( -name '*.toml' -o -name '*.py' -o -name '*.sh' \
        -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.h' -o -name '*_impl.c' \) |
        LC_ALL=C sort | xargs sha256sum
    printf '%s\n' "$here" "${PYTHON:-}" "${CFLAGS:-}"
    if has_liburing; then echo liburing; fi
}
is_ready() {
    [ -f "$stamp" ] && [ "$(inputs | sha256sum)" = "$(cat "$stamp")" ] &&
        [ -x .venv/bin/gdsload ] && .venv/bin/python -c '' 2>/dev/null
}
if is_ready; then exit 0; fi
# Another setup would take this one, while it runs, for one that was interrupted.
if command -v flock >/dev/null 2>&1; then
    mkdir -p .cache
    exec 9>.cache/setup.lock
    code=0
    flock -n -E 75 9 2>/dev/null || code=$?
    if [ "$code" = 75 ]; then
        say "waiting for another setup"
        flock 9
    elif [ "$code" != 0 ]; then
        say "this filesystem has no locks: start no second setup meanwhile"
    fi
    if is_ready; then exit 0; fi
fi

# --- the system's packages --------------------------------------------------------------------

# apt knows the lower-case names alone.
[ -z "${HTTP_PROXY:-}" ] || export http_proxy="${http_proxy:-$HTTP_PROXY}"
[ -z "${HTTPS_PROXY:-}" ] || export https_proxy="${https_proxy:-$HTTPS_PROXY}"
[ -z "${NO_PROXY:-}" ] || export no_proxy="${no_proxy:-$NO_PROXY}"
refreshed=
apt_install() { # package...
    [ -n "$refreshed" ] || apt-get update -qq >/dev/null 2>&1 || say "the package lists are old"
    refreshed=yes
    DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@" \
        >/dev/null 2>&1 # a new machine may be installing its updates
}
store=$here/.cache/apt
apt_here() {
    apt-get -qq -o Debug::NoLocking=1 -o "Dir::State::lists=$store/lists" \
        -o "Dir::Cache=$store/cache" "$@"
}
apt_unpack() { # package...   without root: download, and unpack into $prefix
    mkdir -p "$store/lists/partial" "$store/cache/archives/partial" "$store/debs" "$store/root"
    mkdir -p "$prefix/include" "$prefix/lib" "$prefix/python"
    [ -n "$refreshed" ] || apt_here update >/dev/null 2>&1 || return 1
    refreshed=yes
    (
        cd "$store/debs" && apt_here download "$@" || exit 1
        for deb in *.deb; do dpkg -x "$deb" ../root && rm "$deb"; done
    ) >/dev/null 2>&1 || return 1
    for found in "$store"/root/usr/include "$store"/root/usr/include/python3.*; do
        [ ! -d "$found" ] || cp -R "$found/." "$prefix/include/"
    done
    for found in "$store"/root/usr/lib/*-linux-gnu*/liburing.a; do
        [ ! -f "$found" ] || cp "$found" "$prefix/lib/"
    done
    found=$store/root/usr/lib/python3/dist-packages
    [ ! -d "$found" ] || cp -R "$found/." "$prefix/python/"
    found=$store/root/usr/lib/python$version/distutils
    [ ! -d "$found" ] || { # the standard library has the rest of it, which this one hides
        mkdir -p "$prefix/python/distutils"
        cp -R "/usr/lib/python$version/distutils/." "$found/." "$prefix/python/distutils/"
    }
    rm -rf "$store/root"
}
get() { # what-for debian-packages fedora-packages   0 when they are there
    say "getting $2 ($1)"
    # Several packages in one word, split on purpose.
    # shellcheck disable=SC2086
    if command -v apt-get >/dev/null 2>&1; then
        if is_root; then apt_install $2; else apt_unpack $2; fi
    elif is_root && command -v dnf >/dev/null 2>&1; then
        dnf install -y -q $3 >/dev/null 2>&1
    else
        return 1
    fi
}

python=
find_python() { # candidates...   the first of 3.10 or newer
    for candidate; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            # The interpreter itself: no shim that may choose another one later, and not that of
            # .venv, which may be removed.
            python=$("$candidate" -c 'import os, sys
base = getattr(sys, "_base_executable", "") or sys.executable
unknown = base == sys.executable and sys.prefix != sys.base_prefix  # before 3.11
print(os.path.realpath(base) if unknown else base)')
            return 0
        fi
    done
    return 1
}
if [ -n "${PYTHON:-}" ]; then
    find_python "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.10 or newer"
else
    find_python python3 python3.14 python3.13 python3.12 python3.11 python3.10 ||
        { is_root && get "none of 3.10 or newer is here" python3 python3 && find_python python3; } ||
        die "there is no Python 3.10 or newer; install one, or name it with PYTHON="
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
build=$("$python" -c 'import sys; print(sys.version)')

# shellcheck disable=SC2086 # as in has_liburing
compiles() { printf '%s\n' "$1" | ${CC:-cc} -E "-I$include" - >/dev/null 2>&1; }
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
if ! compiles '#include <stdio.h>'; then
    { is_root && get "there is no C compiler" "gcc libc6-dev" "gcc glibc-devel" &&
        compiles '#include <stdio.h>'; } ||
        die "there is no C compiler; install gcc and libc6-dev, or name one with CC="
fi
if ! compiles '#include <Python.h>'; then
    get "the headers of Python $version" "libpython$version-dev" python3-devel || true
    compiles '#include <Python.h>' ||
        die "Python $version has no headers; install python$version-dev (or python3-devel)"
fi
if [ "${GDSLOAD_LIBURING:-}" != 0 ] && ! has_liburing; then
    get "the io_uring engine" liburing-dev "liburing-devel liburing-static" || true
fi

# --- the environment --------------------------------------------------------------------------

export PIP_DISABLE_PIP_VERSION_CHECK=1
# Settings of the user's own installations.
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0
unset PIP_TARGET PIP_PREFIX PIP_ROOT
# shellcheck source=scripts/uv.sh
. scripts/uv.sh

uv=
find_uv() {
    for candidate in uv .venv/bin/uv "$here/.cache/uv/bin/uv"; do
        if "$candidate" --version >/dev/null 2>&1; then
            uv=$candidate
            return 0
        fi
    done
    return 1
}
pip_uv() { # python...   uv of its own, with somebody else's pip
    "$@" -m pip install -q --target .cache/uv uv >/dev/null 2>&1 && find_uv
}
has_pip() { .venv/bin/python -m pip --version >/dev/null 2>&1; }
make_venv() {
    say "making .venv with Python $version"
    rm -rf .venv
    if find_uv && "$uv" venv -q --python "$python" .venv; then return 0; fi
    if "$python" -m venv .venv >/dev/null 2>&1; then return 0; fi
    if is_root && get "this Python cannot make environments" "python$version-venv" python3 &&
        rm -rf .venv && "$python" -m venv .venv >/dev/null 2>&1; then return 0; fi
    rm -rf .venv
    say "this Python cannot make environments: getting uv, which can"
    pip=python3-pip
    [ "$version" != 3.10 ] || pip="python3-pip python3-distutils" # pip imports it there
    pip_uv "$python" || { get "an installer" "$pip" python3-pip &&
        pip_uv env PYTHONPATH="$prefix/python:/usr/lib/python3/dist-packages" "$python"; } ||
        die "neither venv, pip nor uv is here; install python3-venv, or uv"
    "$uv" venv -q --python "$python" .venv
}
unfinished=.venv/gdsload.unfinished
if [ -e "$unfinished" ]; then
    say "the last installation was interrupted: its packages may be incomplete"
    make_venv
elif ! .venv/bin/python -c 'import sys
sys.exit(sys.version_info < (3, 10) or sys.argv[1] not in ("", sys.version))' \
    "${PYTHON:+$build}" 2>/dev/null; then
    make_venv
elif ! find_uv && ! has_pip && ! .venv/bin/python -m ensurepip >/dev/null 2>&1; then
    make_venv # one that nothing can be installed into
fi
if ! find_uv && has_pip; then
    .venv/bin/python -m pip install -q uv >/dev/null 2>&1 || true
    find_uv || say "uv could not be installed: pip alone is slower"
fi

# torch and its CUDA libraries are 5.2 GB of them: an environment for the demo alone saves little.
say "building gdsload and installing 6 GB of packages, if they are missing (some minutes)"
wanted=$(inputs | sha256sum) # before: what is edited meanwhile is not built
rm -f "$stamp"
: >"$unfinished"
code=0
quiet=-q
[ ! -t 2 ] || quiet= # a terminal shows the downloads
# Remove modules of an earlier build: what is not built now must not stay.
has_liburing || rm -f src/gdsload/_native/uring.*.so
for so in src/gdsload/_native/*.so; do
    [ -f "${so%%.*}.pyx" ] || rm -f "$so"
done
if [ -n "$uv" ] && "$uv" pip install ${quiet:+"$quiet"} --python .venv/bin/python \
    --reinstall-package gdsload --refresh-package gdsload -e '.[transformers,test,bench]'; then
    :
else
    [ -z "$uv" ] || say "uv could not; trying pip"
    has_pip || .venv/bin/python -m ensurepip >/dev/null 2>&1 || die "nothing was installed"
    .venv/bin/python -m pip install ${quiet:+"$quiet"} -e '.[transformers,test,bench]' || code=$?
fi
rm -f "$unfinished" # also if it failed: then the installer has ended, and repeats what is missing
[ "$code" = 0 ] || exit "$code"
printf '%s\n' "$wanted" >"$stamp"
modules=$(cd src/gdsload/_native && for so in *.so; do [ ! -f "$so" ] || printf ' %s' "${so%%.*}"; done)
case "${GDSLOAD_LIBURING:-}$modules " in
    0* | *" uring "*) ;;
    *) say "no io_uring engine: it needs liburing 2.3 or newer (package liburing-dev)" ;;
esac
say "done; native modules:$modules"
