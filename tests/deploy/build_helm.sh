#!/bin/sh
# Build helm outside of the source tree, for the tests of the charts.
#
#   sh tests/deploy/build_helm.sh
#
# On success the last line of standard output is the program, and a second run finds it there at once. Where it cannot
# be built, the reason goes to standard error and the exit status is 1. HELM names another release; TOPOPROXY_HELM_LIMIT
# bounds the time (seconds).
set -eu

version=${HELM:-v3.19.5}
module=helm.sh/helm/v3
limit=${TOPOPROXY_HELM_LIMIT:-900}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/helm-$version

give_up() {
    echo "cannot build helm $version: $1" >&2
    exit 1
}

if [ ! -x "$directory/helm" ]; then
    for tool in go flock; do
        command -v $tool >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
fi
if [ ! -x "$directory/helm" ]; then
    # The module is built where Go keeps it: nothing of it is copied, and its own go.sum decides what goes in.
    log=$directory/build.log
    export CGO_ENABLED=0 GOFLAGS=-mod=mod
    (cd "$directory" && timeout "$limit" go mod download -json "$module@$version") \
        >"$directory/module.json" 2>"$log" ||
        give_up "$module@$version cannot be downloaded: $(tail -n 1 "$log")"
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$source" ] || give_up "Go does not say where $module is"
    export GOFLAGS=-mod=readonly
    (cd "$source" && timeout "$limit" nice go build -trimpath -buildvcs=false -ldflags '-s -w' \
        -o "$directory/helm.new" ./cmd/helm) >>"$log" 2>&1 || give_up "$(tail -n 1 "$log")"
    mv "$directory/helm.new" "$directory/helm"
fi
echo "$directory/helm"
