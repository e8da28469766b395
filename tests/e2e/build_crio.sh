#!/bin/sh
# Build CRI-O outside of the source tree for the end-to-end tests.
#
#   sh tests/e2e/build_crio.sh
#
# On success the last line of standard output is the directory for TOPOPROXY_CRIO; a second run reuses the build. If
# the build fails, the reason is printed to standard error and the exit status is 1. conmon and runc are those of
# the host. CRIO names another release; TOPOPROXY_CRIO_LIMIT bounds the time (seconds).
set -eu

version=${CRIO:-v1.34.0}
what="CRI-O $version"
limit=${TOPOPROXY_CRIO_LIMIT:-1200}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/crio-$version
. "$(dirname "$0")/../go_build.sh"
# Omit the parts that need libraries and their headers: other storage drivers, seccomp, SELinux, signatures.
tags="containers_image_ostree_stub containers_image_openpgp exclude_graphdriver_btrfs btrfs_noversion"

ready() { [ -x "$directory/crio" ] && [ -x "$directory/pinns" ]; }

ready || begin_build cc
if ! ready; then
    download "github.com/cri-o/cri-o@$version"
    go_make "$directory/crio" ./cmd/crio -tags "$tags"
    cc -std=c99 -Os -static -s -o "$directory/pinns.new" "$source"/pinns/src/*.c >>"$log" 2>&1 ||
        give_up "pinns: $(tail -n 1 "$log")"
    mv "$directory/pinns.new" "$directory/pinns"
fi
echo "$directory"
