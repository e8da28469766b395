#!/bin/sh
# Build critest and crictl, the CRI conformance suite and client, outside of the source tree.
#
#   sh tests/e2e/build_critest.sh
#
# On success the last line of standard output is the directory of both programs; a second run reuses the build. If
# the build fails, the reason is printed to standard error and the exit status is 1.
# TOPOPROXY_CRITEST_LIMIT bounds the time (seconds); TOPOPROXY_CRITEST_DIR names a directory with built programs.
set -eu

version=v1.36.0
what="critest and crictl"
limit=${TOPOPROXY_CRITEST_LIMIT:-400}
directory=${TOPOPROXY_CRITEST_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/cri-tools-$version}
. "$(dirname "$0")/../go_build.sh"

ready() { [ -x "$directory/critest" ] && [ -x "$directory/crictl" ]; }

if ! ready; then
    [ -z "${TOPOPROXY_CRITEST_DIR:-}" ] || give_up "they are not in $directory"
    begin_build
fi
if ! ready; then
    download "sigs.k8s.io/cri-tools@$version"
    go_make "$directory/critest" ./cmd/critest -c
    go_make "$directory/crictl" ./cmd/crictl
fi
echo "$directory"
