#!/bin/sh
# Build the programs of Koordinator that the tests use, outside of the source tree: koord-runtime-proxy, and a hook
# server made of koordlet's packages (hookserver/main.go).
#
#   sh tests/e2e/koordinator/build.sh
#
# On success the last line of standard output is the directory for TOPOPROXY_KOORDINATOR; a second run reuses the
# build. If the build fails, the reason is printed to standard error and the exit status is 1. KOORDINATOR names
# another release; TOPOPROXY_KOORDINATOR_LIMIT bounds the time (seconds).
set -eu

version=${KOORDINATOR:-v1.8.0}
what="Koordinator $version"
limit=${TOPOPROXY_KOORDINATOR_LIMIT:-1800}
here=$(cd "$(dirname "$0")" && pwd)
ours=$(cksum <"$here/hookserver/main.go" | tr ' ' -)
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/koordinator-$version-$ours
. "$here/../../go_build.sh"

ready() { [ -x "$directory/koord-runtime-proxy" ] && [ -x "$directory/hookserver" ]; }

ready || begin_build
if ! ready; then
    # The module cache is read-only, so build in a copy. The hook server is added to the commands of Koordinator. The
    # one package that needs a C library (perf events, which no hook uses) is replaced by its stub for other systems.
    download "github.com/koordinator-sh/koordinator@$version"
    kept=$source
    source=$directory/source
    rm -rf "$source"
    mkdir -p "$source/cmd/topoproxy-hookserver"
    cp -R "$kept/apis" "$kept/cmd" "$kept/pkg" "$kept/go.mod" "$kept/go.sum" "$source" || give_up "no room in $directory"
    chmod -R u+w "$source"
    perf=$source/pkg/koordlet/util/perf_group
    sed '/^\/\/.*build/d' "$perf/perf_group_unsupported.go" >"$perf/perf_group_linux.go"
    cp "$here/hookserver/main.go" "$source/cmd/topoproxy-hookserver"
    go_make "$directory/koord-runtime-proxy" ./cmd/koord-runtime-proxy
    go_make "$directory/hookserver" ./cmd/topoproxy-hookserver
    rm -rf "$source"
fi
echo "$directory"
