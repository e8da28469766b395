#!/bin/sh
# Build programs of Kubernetes for the tests in a cluster, outside of the source tree, through Go's
# module proxy (ten minutes of two cores, once). etcd is Debian's package etcd-server.
#
#   sh tests/cluster/build.sh [kube-apiserver kube-scheduler kube-controller-manager kubelet]
#
# On success the last line of standard output is the directory for TOPOPROXY_CLUSTER, and a second run finds it there
# at once. If it cannot be built, the reason goes to standard error and the exit status is 1. KUBERNETES names
# another release; TOPOPROXY_CLUSTER_LIMIT bounds the time (seconds).
set -eu

version=${KUBERNETES:-v1.36.2}
what="Kubernetes $version"
limit=${TOPOPROXY_CLUSTER_LIMIT:-3600}
programs=${*:-kube-apiserver}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/kubernetes-$version
. "$(dirname "$0")/../go_build.sh"

missing() { for program in $programs; do [ -x "$directory/$program" ] || echo "$program"; done; }

[ -z "$(missing)" ] || begin_build
if [ -n "$(missing)" ]; then
    download "k8s.io/kubernetes@$version"
    mod=$source/go.mod source=$directory/source
    mkdir -p "$source"
    cd "$source"
    modules=mod
    # The module replaces its staging modules by directories of its repository; a module that depends on it must
    # replace them by their versions.
    {
        printf 'module controlplane\n\ngo 1.26\n\nrequire k8s.io/kubernetes %s\n\nreplace (\n' "$version"
        sed -n 's#^[[:space:]]*\(k8s\.io/[a-z0-9-]*\) => \./staging.*#\1#p' "$mod" | sort -u |
            while read -r staged; do printf '\t%s => %s v0.%s\n' "$staged" "$staged" "${version#v1.}"; done
        printf ')\n'
    } >go.mod
    printf 'package controlplane\n\nimport _ "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"\n' >deps.go
    GOFLAGS=-mod=mod timeout "$limit" go mod tidy >>"$log" 2>&1 || give_up "$(tail -n 1 "$log")"
    minor=${version#v1.}
    minor=${minor%%.*}
    flags="-s -w"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags="$flags -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$minor"
    done
    for program in $(missing); do
        go_make "$directory/$program" "k8s.io/kubernetes/cmd/$program"
    done
fi
echo "$directory"
