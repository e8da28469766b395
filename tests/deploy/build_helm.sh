#!/bin/sh
# Build helm outside of the source tree, for the tests of the charts.
#
#   sh tests/deploy/build_helm.sh
#
# On success the last line of standard output is the program, and a second run finds it there at once. If it cannot
# be built, the reason goes to standard error and the exit status is 1. HELM names another release; TOPOPROXY_HELM_LIMIT
# bounds the time (seconds).
set -eu

version=${HELM:-v3.19.5}
what="helm $version"
limit=${TOPOPROXY_HELM_LIMIT:-900}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/helm-$version
. "$(dirname "$0")/../go_build.sh"

[ -x "$directory/helm" ] || begin_build
if [ ! -x "$directory/helm" ]; then
    download "helm.sh/helm/v3@$version"
    go_make "$directory/helm" ./cmd/helm
fi
echo "$directory/helm"
