#!/bin/sh
# Build the sample device plugin of Kubernetes (test/images/sample-device-plugin), unmodified, outside of the source
# tree.
#
#   sh tests/e2e/build_sample_plugin.sh
#
# On success the last line of standard output is the path of the program; a second run reuses the build. If the
# build fails, the reason is printed to standard error and the exit status is 1. KUBERNETES names another release;
# TOPOPROXY_SAMPLE_PLUGIN_LIMIT bounds the time (seconds); TOPOPROXY_SAMPLE_PLUGIN names a built program.
set -eu

version=${KUBERNETES:-v1.36.2}
what="the sample device plugin of Kubernetes $version"
limit=${TOPOPROXY_SAMPLE_PLUGIN_LIMIT:-900}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/sample-device-plugin-$version
plugin=${TOPOPROXY_SAMPLE_PLUGIN:-$directory/sample-device-plugin}
. "$(dirname "$0")/../go_build.sh"

if ! [ -x "$plugin" ]; then
    [ -z "${TOPOPROXY_SAMPLE_PLUGIN:-}" ] || give_up "there is no program $plugin"
    begin_build
fi
if ! [ -x "$plugin" ]; then
    # Kubernetes replaces its staging modules with directories that its module does not contain. They are also
    # published as separate modules (v0.36.2 for v1.36.2): an empty module requires these, and go builds from it.
    download "k8s.io/kubernetes@$version"
    build=$directory/build
    rm -rf "$build"
    mkdir -p "$build" || give_up "there is no directory $build"
    {
        echo "module topoproxy.invalid/sample"
        sed -n '/^go /p' "$source/go.mod"
        echo "require k8s.io/kubernetes $version"
        sed -n "s|^[[:space:]]*\(k8s\.io/[a-z-]*\) => \./staging/src/.*|replace \1 => \1 v0.${version#v1.}|p" \
            "$source/go.mod"
    } >"$build/go.mod"
    cp "$source/go.sum" "$build" || give_up "there is no space in $build"
    source=$build modules=mod
    go_make "$plugin" k8s.io/kubernetes/test/images/sample-device-plugin
    rm -rf "$build"
fi
echo "$plugin"
