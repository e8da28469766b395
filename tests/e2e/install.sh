#!/bin/sh
# Install the dependencies of the end-to-end tests: a container runtime, static tools for images, CNI plugins.
#
#   sh tests/e2e/install.sh [PACKAGE...]
#
# If packages are named, they are installed instead.
# As root on Debian (or another system with apt) the missing packages are installed; if none is missing, nothing
# is changed and no network is used. Elsewhere the reason is printed and the exit status is still 0: the
# end-to-end tests are then skipped for the same reason. Time is bounded by TOPOPROXY_APT_LIMIT (seconds).
# TOPOPROXY_INSTALL=no: only name what is missing, because an earlier run has already tried to install it.
set -u

packages="containerd runc busybox-static containernetworking-plugins iproute2 iptables socat util-linux"
[ $# = 0 ] || packages=$*
limit=${TOPOPROXY_APT_LIMIT:-240}

skip() {
    echo "end-to-end tests will be skipped: $1"
    exit 0
}

[ "$(uname -s)" = Linux ] || skip "this is not Linux"

missing=
for package in $packages; do
    state=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) || state=
    case $state in
        *" installed") ;;
        *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0
[ "${TOPOPROXY_INSTALL:-yes}" != no ] || skip "these are not installed:$missing"

command -v apt-get >/dev/null 2>&1 || skip "there is no apt-get here, and these are not installed:$missing"
[ "$(id -u)" = 0 ] || skip "only root can install$missing"

log=$(mktemp) || skip "no temporary file can be made"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
apt_get() { timeout -k 10 "$limit" apt-get -q -y -o DPkg::Lock::Timeout=60 -o Acquire::Retries=2 "$@" >>"$log" 2>&1; }

echo "installing:$missing"
# The package lists may exist already, and to fetch them is slow: update them only if the first attempt fails.
# shellcheck disable=SC2086  # a list of packages
apt_get install --no-install-recommends $missing ||
    { apt_get update && apt_get install --no-install-recommends $missing; } ||
    { tail -n 5 "$log" >&2; skip "apt-get could not install$missing"; }
