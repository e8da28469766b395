#!/bin/sh
# Build CRI-O outside of the source tree, for the end-to-end tests to run on.
#
#   sh tests/e2e/build_crio.sh
#
# On success the last line of standard output is the directory for TOPOPROXY_CRIO, and a second run finds it there at
# once. Where it cannot be built, the reason goes to standard error and the exit status is 1. conmon and runc are
# the machine's. CRIO names another release; TOPOPROXY_CRIO_LIMIT bounds the time (seconds).
set -eu

version=${CRIO:-v1.34.0}
module=github.com/cri-o/cri-o
limit=${TOPOPROXY_CRIO_LIMIT:-1200}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/crio-$version
# What would need libraries and their headers is left out: other storage drivers, seccomp, SELinux, signatures.
tags="containers_image_ostree_stub containers_image_openpgp exclude_graphdriver_btrfs btrfs_noversion"

give_up() {
    echo "cannot build CRI-O $version: $1" >&2
    exit 1
}

ready() { [ -x "$directory/crio" ] && [ -x "$directory/pinns" ]; }

if ! ready; then
    for tool in go cc flock; do
        command -v $tool >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
fi
if ! ready; then
    # The module is built where Go keeps it: nothing of it is copied, and its own go.sum decides what goes in.
    log=$directory/build.log
    export CGO_ENABLED=0 GOFLAGS=-mod=mod
    (cd "$directory" && timeout "$limit" go mod download -json "$module@$version") \
        >"$directory/module.json" 2>"$log" ||
        give_up "$module@$version cannot be had: $(tail -n 1 "$log")"
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$source" ] || give_up "Go does not say where $module is"
    export GOFLAGS=-mod=readonly
    (cd "$source" && timeout "$limit" nice go build -trimpath -buildvcs=false -tags "$tags" -ldflags '-s -w' \
        -o "$directory/crio.new" ./cmd/crio) >>"$log" 2>&1 || give_up "$(tail -n 1 "$log")"
    cc -std=c99 -Os -static -s -o "$directory/pinns.new" "$source"/pinns/src/*.c >>"$log" 2>&1 ||
        give_up "pinns: $(tail -n 1 "$log")"
    mv "$directory/crio.new" "$directory/crio"
    mv "$directory/pinns.new" "$directory/pinns"
fi
echo "$directory"
