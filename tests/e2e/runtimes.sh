#!/bin/sh
# Download other container runtimes than the host's for the end-to-end tests.
#
#   sh tests/e2e/runtimes.sh DIRECTORY [SUITE...]
#
# Packages of newer Debian suites (default: trixie with containerd 1.7, sid with 2.x) are downloaded from the
# mirror that the host's apt uses, with its keys. They are unpacked below DIRECTORY and never installed. Their
# containerd runs on an older Debian; their runc needs a newer C library and is used only if it runs here. With
# Go, a current runc is built from its module for the newest containerd (RUNC=VERSION; RUNC=no builds none).
#
# Prints one directory per line, each a value for TOPOPROXY_CONTAINERD. Existing directories are not downloaded
# again. A failure is reported on standard error and its runtime omitted; the exit status is 1 if all fail.
set -u

directory=${1:?a directory}
shift
[ $# -gt 0 ] || set -- trixie sid
runc=${RUNC:-v1.3.6}
limit=${TOPOPROXY_APT_LIMIT:-240}
keys=/usr/share/keyrings/debian-archive-keyring.gpg

report() { echo "runtimes.sh: $*" >&2; }
for tool in apt-get dpkg-deb timeout; do
    command -v "$tool" >/dev/null 2>&1 || { report "$tool is not installed"; exit 1; }
done
mkdir -p "$directory" || exit 1
directory=$(cd "$directory" && pwd)
log=$directory/log
: >"$log"

mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN)' 'Created-By: Packages' 2>>"$log" |
    awk '$2 == "Debian" && $1 !~ /security/ { print $1; exit }')
[ -n "$mirror" ] || { report "apt has no Debian mirror configured"; exit 1; }
apt=$directory/apt
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
for suite in "$@"; do echo "deb [signed-by=$keys] $mirror $suite main"; done >"$apt/sources.list"
apt_get() {
    timeout -k 10 "$limit" apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=2 \
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" "$@" >>"$log" 2>&1 </dev/null
}

updated=
fetch() { # SUITE TO
    rm -rf "$2.new"
    mkdir -p "$2.new/deb" "$2.new/root"
    [ -n "$updated" ] || { apt_get update && updated=yes; } ||
        { report "cannot update the package lists, see $log"; return 1; }
    (cd "$2.new/deb" && apt_get download "containerd/$1" "runc/$1") ||
        { report "no packages of $1, see $log"; return 1; }
    for package in "$2.new/deb"/*.deb; do
        dpkg-deb -x "$package" "$2.new/root" >>"$log" 2>&1 || { report "cannot unpack $package"; return 1; }
    done
    for name in containerd ctr containerd-shim-runc-v2 runc; do
        found=$(find "$2.new/root" -type f -name "$name" -path '*bin/*' | head -n 1)
        if [ -n "$found" ] && "$found" --version >>"$log" 2>&1 || [ "$name" = containerd-shim-runc-v2 ]; then
            mv "$found" "$2.new/$name"
        elif [ "$name" != runc ]; then
            report "$name of $1 does not run here, see $log"
            return 1
        fi
    done
    rm -rf "$2.new/deb" "$2.new/root"
    mv "$2.new" "$2"
}

build() { # TO: build runc without the parts that need libraries; its module has no replace directives
    command -v go >/dev/null 2>&1 || { report "no runc $runc: go is not installed"; return 1; }
    module=github.com/opencontainers/runc@$runc
    at=$(cd / && timeout -k 10 "$limit" go mod download -json "$module" 2>>"$log" |
        awk -F '"' '$2 == "Dir" { print $4 }')
    [ -n "$at" ] || { report "no runc $runc, see $log"; return 1; }
    rm -rf "$directory/source"
    cp -r "$at" "$directory/source" && chmod -R u+w "$directory/source" || return 1
    (cd "$directory/source" && timeout -k 10 600 go build -mod=mod -trimpath -o "$1/runc" . >>"$log" 2>&1) ||
        { report "runc $runc does not build, see $log"; return 1; }
    rm -rf "$directory/source"
}

newest=
for suite in "$@"; do
    to=$directory/$suite
    [ -x "$to/containerd" ] || fetch "$suite" "$to" || continue
    newest=$to
    echo "$to"
done
[ -n "$newest" ] || exit 1
if [ "$runc" != no ]; then
    to=$newest-runc-$runc
    if [ ! -x "$to/runc" ]; then
        mkdir -p "$to" || exit 0
        for name in containerd ctr containerd-shim-runc-v2; do cp "$newest/$name" "$to" || exit 0; done
        build "$to" || exit 0
    fi
    echo "$to"
fi
