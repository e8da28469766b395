#!/bin/sh
# Build the sample device plug-in of Kubernetes (test/images/sample-device-plugin), unmodified, outside of the source
# tree.
#
#   sh tests/e2e/build_sample_plugin.sh
#
# On success the last line of standard output is the path of the program, and a second run finds it there at once.
# Where it cannot be built, the reason goes to standard error and the exit status is 1. KUBERNETES names another
# release; TOPOPROXY_SAMPLE_PLUGIN_LIMIT bounds the time (seconds); TOPOPROXY_SAMPLE_PLUGIN names a ready program.
set -eu

version=${KUBERNETES:-v1.36.2}
module=k8s.io/kubernetes
limit=${TOPOPROXY_SAMPLE_PLUGIN_LIMIT:-900}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/sample-device-plugin-$version
program=${TOPOPROXY_SAMPLE_PLUGIN:-$directory/sample-device-plugin}

give_up() {
    echo "cannot build the sample device plug-in of Kubernetes $version: $1" >&2
    exit 1
}

if ! [ -x "$program" ]; then
    [ -z "${TOPOPROXY_SAMPLE_PLUGIN:-}" ] || give_up "there is no program $program"
    for tool in go flock; do
        command -v $tool >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "there is no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build runs in $directory"
fi
if ! [ -x "$program" ]; then
    # Kubernetes takes its staging modules from its own tree, which is not in the module. They are published as
    # modules of their own, v0.36.2 for v1.36.2: a module without any code names these, and its dependency is built.
    log=$directory/build.log
    export CGO_ENABLED=0 GOFLAGS=-mod=mod
    (cd "$directory" && timeout "$limit" go mod download -json "$module@$version") >"$directory/module.json" 2>"$log" ||
        give_up "$module@$version cannot be downloaded: $(tail -n 1 "$log")"
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$source" ] || give_up "Go does not say where $module is"
    build=$directory/build
    rm -rf "$build"
    mkdir -p "$build" || give_up "there is no directory $build"
    {
        echo "module topoproxy.invalid/sample"
        sed -n '/^go /p' "$source/go.mod"
        echo "require $module $version"
        sed -n "s|^[[:space:]]*\(k8s\.io/[a-z-]*\) => \./staging/src/.*|replace \1 => \1 v0.${version#v1.}|p" \
            "$source/go.mod"
    } >"$build/go.mod"
    cp "$source/go.sum" "$build" || give_up "there is no space in $build"
    (cd "$build" && timeout "$limit" nice go build -p "${TOPOPROXY_GO_JOBS:-2}" -trimpath -buildvcs=false \
        -ldflags '-s -w' -o "$program.new" "$module/test/images/sample-device-plugin") >>"$log" 2>&1 ||
        give_up "$(tail -n 1 "$log")"
    mv "$program.new" "$program"
    rm -rf "$build"
fi
echo "$program"
