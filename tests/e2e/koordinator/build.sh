#!/bin/sh
# Build what of Koordinator the tests talk to, outside of the source tree: koord-runtime-proxy, and a hook server
# out of koordlet's own parts (hookserver/main.go).
#
#   sh tests/e2e/koordinator/build.sh
#
# On success the last line of standard output is the directory for TOPOPROXY_KOORDINATOR, and a second run finds it
# there at once. Where it cannot be built, the reason goes to standard error and the exit status is 1. KOORDINATOR
# names another release; TOPOPROXY_KOORDINATOR_LIMIT bounds the time (seconds).
set -eu

version=${KOORDINATOR:-v1.8.0}
module=github.com/koordinator-sh/koordinator
limit=${TOPOPROXY_KOORDINATOR_LIMIT:-1800}
here=$(cd "$(dirname "$0")" && pwd)
ours=$(cksum <"$here/hookserver/main.go" | tr ' ' -)
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/koordinator-$version-$ours

give_up() {
    echo "cannot build Koordinator $version: $1" >&2
    exit 1
}

ready() { [ -x "$directory/koord-runtime-proxy" ] && [ -x "$directory/hookserver" ]; }

if ! ready; then
    for tool in go flock; do
        command -v $tool >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
fi
if ! ready; then
    # Go builds what lies where it keeps modules only as it is, so this is done in a copy. Its own go.sum decides what
    # goes in. Our program is put beside its own, and Linux uses what it has for other systems in place of the one
    # package that would need a C library (perf events, which no hook uses).
    log=$directory/build.log
    export CGO_ENABLED=0 GOFLAGS=-mod=mod
    (cd "$directory" && timeout "$limit" go mod download -json "$module@$version") >"$directory/module.json" 2>"$log" ||
        give_up "$module@$version cannot be had: $(tail -n 1 "$log")"
    kept=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$kept" ] || give_up "Go does not say where $module is"
    source=$directory/source
    rm -rf "$source"
    mkdir -p "$source/cmd/topoproxy-hookserver"
    cp -R "$kept/apis" "$kept/cmd" "$kept/pkg" "$kept/go.mod" "$kept/go.sum" "$source" || give_up "no room in $directory"
    chmod -R u+w "$source"
    perf=$source/pkg/koordlet/util/perf_group
    sed '/^\/\/.*build/d' "$perf/perf_group_unsupported.go" >"$perf/perf_group_linux.go"
    cp "$here/hookserver/main.go" "$source/cmd/topoproxy-hookserver"
    export GOFLAGS=-mod=readonly
    build() {
        (cd "$source" && timeout "$limit" nice go build -p "${TOPOPROXY_GO_JOBS:-2}" -trimpath -buildvcs=false \
            -ldflags '-s -w' -o "$directory/$1.new" "./cmd/$2") >>"$log" 2>&1 || give_up "$1: $(tail -n 1 "$log")"
    }
    build koord-runtime-proxy koord-runtime-proxy
    build hookserver topoproxy-hookserver
    mv "$directory/koord-runtime-proxy.new" "$directory/koord-runtime-proxy"
    mv "$directory/hookserver.new" "$directory/hookserver"
    rm -rf "$source"
fi
echo "$directory"
