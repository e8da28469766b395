#!/bin/sh
# Build programs of Kubernetes for the tests in a cluster, outside of the source tree, through Go's
# module proxy (ten minutes of two cores, once). etcd is Debian's package etcd-server.
#
#   sh tests/cluster/build.sh [kube-apiserver kube-scheduler kube-controller-manager kubelet]
#
# On success the last line of standard output is the directory for TOPOPROXY_CLUSTER, and a second run finds it there
# at once. Where it cannot be built, the reason goes to standard error and the exit status is 1. KUBERNETES names
# another release; TOPOPROXY_CLUSTER_LIMIT bounds the time (seconds).
set -eu

version=${KUBERNETES:-v1.36.2}
limit=${TOPOPROXY_CLUSTER_LIMIT:-3600}
programs=${*:-kube-apiserver}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/kubernetes-$version

give_up() {
    echo "cannot build Kubernetes $version: $1" >&2
    exit 1
}

missing() { for program in $programs; do [ -x "$directory/$program" ] || echo "$program"; done; }

if [ -n "$(missing)" ]; then
    for tool in go flock; do
        command -v $tool >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
fi
if [ -n "$(missing)" ]; then
    source=$directory/source log=$directory/build.log
    mkdir -p "$source"
    cd "$source"
    export GOFLAGS=-mod=mod CGO_ENABLED=0
    timeout "$limit" go mod download -json "k8s.io/kubernetes@$version" >"$directory/module.json" 2>"$log" ||
        give_up "k8s.io/kubernetes@$version cannot be had: $(tail -n 1 "$log")"
    mod=$(sed -n 's/^[[:space:]]*"GoMod": "\(.*\)",*$/\1/p' "$directory/module.json")
    # The module replaces its staging modules by directories of its repository; a module that depends on it must
    # replace them by their versions.
    {
        printf 'module controlplane\n\ngo 1.26\n\nrequire k8s.io/kubernetes %s\n\nreplace (\n' "$version"
        sed -n 's#^[[:space:]]*\(k8s\.io/[a-z0-9-]*\) => \./staging.*#\1#p' "$mod" | sort -u |
            while read -r staged; do printf '\t%s => %s v0.%s\n' "$staged" "$staged" "${version#v1.}"; done
        printf ')\n'
    } >go.mod
    printf 'package controlplane\n\nimport _ "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"\n' >deps.go
    timeout "$limit" go mod tidy >>"$log" 2>&1 || give_up "$(tail -n 1 "$log")"
    minor=${version#v1.}
    minor=${minor%%.*}
    flags="-s -w"
    for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
        flags="$flags -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$minor"
    done
    for program in $(missing); do
        timeout "$limit" nice go build -p "${TOPOPROXY_GO_JOBS:-2}" -trimpath -ldflags "$flags" \
            -o "$directory/$program.new" "k8s.io/kubernetes/cmd/$program" >>"$log" 2>&1 ||
            give_up "$program: $(tail -n 1 "$log")"
        mv "$directory/$program.new" "$directory/$program"
    done
fi
echo "$directory"
