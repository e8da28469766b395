#!/bin/sh
# Build critest and crictl, the CRI conformance suite and client, outside of the source tree.
#
#   sh tests/e2e/build_critest.sh
#
# On success the last line of standard output is the directory that holds both programs, and a second run finds them
# there at once. Where they cannot be built, the reason goes to standard error and the exit status is 1.
# TOPOPROXY_CRITEST_LIMIT bounds the time (seconds); TOPOPROXY_CRITEST_DIR names a directory with ready programs.
set -eu

version=v1.36.0
module=sigs.k8s.io/cri-tools
limit=${TOPOPROXY_CRITEST_LIMIT:-400}
directory=${TOPOPROXY_CRITEST_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/cri-tools-$version}

give_up() {
    echo "cannot build critest and crictl: $1" >&2
    exit 1
}

ready() { [ -x "$directory/critest" ] && [ -x "$directory/crictl" ]; }

if ! ready; then
    [ -z "${TOPOPROXY_CRITEST_DIR:-}" ] || give_up "they are not in $directory"
    command -v go >/dev/null 2>&1 || give_up "there is no Go compiler"
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
fi
if ! ready; then
    # The module is built where Go keeps it: nothing of it is copied, and its own go.sum decides what goes in.
    log=$directory/build.log
    export CGO_ENABLED=0 GOFLAGS=-mod=mod
    (cd "$directory" && timeout 120 go mod download -json "$module@$version") >"$directory/module.json" 2>"$log" ||
        give_up "$module@$version cannot be had: $(tail -n 1 "$log")"
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$source" ] || give_up "Go does not say where $module is"
    export GOFLAGS=-mod=readonly
    build() { (cd "$source" && timeout "$limit" nice "$@") >>"$log" 2>&1 || give_up "$(tail -n 1 "$log")"; }
    build go test -c -trimpath -buildvcs=false -ldflags '-s -w' -o "$directory/critest.new" ./cmd/critest
    build go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$directory/crictl.new" ./cmd/crictl
    mv "$directory/critest.new" "$directory/critest"
    mv "$directory/crictl.new" "$directory/crictl"
fi
echo "$directory"
