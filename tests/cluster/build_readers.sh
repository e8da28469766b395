#!/bin/sh
# Build schedulers of other projects that read what the cluster agent publishes, outside of the source tree, through
# Go's module proxy (some minutes of two cores each, once):
#
#   sh tests/cluster/build_readers.sh [nrt-scheduler volcano-scheduler koord-scheduler]
#
# On success the last line of standard output is the directory for TOPOPROXY_READERS, and a second run finds it there
# at once. The reason why one cannot be built goes to standard error; the exit status is 1 if there is none of them.
# TOPOPROXY_CLUSTER_LIMIT bounds the time of each step (seconds).
set -eu

what="the readers"
limit=${TOPOPROXY_CLUSTER_LIMIT:-3600}
programs=${*:-nrt-scheduler volcano-scheduler koord-scheduler}
directory=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/topoproxy/readers-1
. "$(dirname "$0")/../go_build.sh"

# The module of a program with its version, its package, and the release of Kubernetes that its go.mod names with the one
# that takes its place: not each patch release of the staging modules is published.
source_of() {
    case $1 in
    nrt-scheduler) echo sigs.k8s.io/scheduler-plugins@v0.34.7 cmd/scheduler 34.7:34.1 ;;
    volcano-scheduler) echo volcano.sh/volcano@v1.10.0 cmd/scheduler =:= ;;
    koord-scheduler) echo github.com/koordinator-sh/koordinator@v1.8.0 cmd/koord-scheduler =:= ;;
    *) return 1 ;;
    esac
}

warn() {
    echo "cannot build $1: $2" >&2
    return 1
}

# go.mod and go.sum are copies: files of the module cache are read-only, and may lack what -mod=mod adds.
build() {
    program=$1 module=$2 package=$3 required=${4%:*} published=${4#*:}
    work=$directory/$program.build log=$directory/$program.log
    mkdir -p "$work"
    (cd "$work" && timeout "$limit" go mod download -json "$module") >"$work/module.json" 2>"$log" ||
        { warn "$program" "$module cannot be had: $(grep -h '"Error"' "$work/module.json" | tail -n 1)"; return 1; }
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$work/module.json")
    for file in mod sum; do install -m 644 "$source/go.$file" "$work/use.$file"; done
    sed -i "s#\(k8s\.io/[a-z0-9-]*\) v\([01]\)\.$required#\1 v\2.$published#" "$work/use.mod"
    (cd "$source" && CGO_ENABLED=0 GOFLAGS=-mod=mod timeout "$limit" nice go build -p "${TOPOPROXY_GO_JOBS:-2}" \
        -trimpath -buildvcs=false -ldflags "-s -w" -modfile="$work/use.mod" -o "$directory/$program.new" "./$package") \
        >>"$log" 2>&1 || { warn "$program" "$(tail -n 1 "$log")"; return 1; }
    mv "$directory/$program.new" "$directory/$program"
    rm -rf "$work"
}

complete() { for program in $programs; do [ -x "$directory/$program" ] || return 1; done; }

if ! complete; then
    begin_build
    for program in $programs; do
        [ -x "$directory/$program" ] && continue
        # shellcheck disable=SC2046
        build "$program" $(source_of "$program") || :
    done
fi
for program in $programs; do
    [ -x "$directory/$program" ] && { echo "$directory"; exit 0; }
done
exit 1
