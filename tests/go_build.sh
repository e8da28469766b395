# What the scripts that build Go programs for the tests have in common. A script sets `what` (for messages), `limit`
# (seconds for each step) and `directory` (where the programs go), and sources this.
# shellcheck shell=sh disable=SC2034,SC2154

give_up() {
    echo "cannot build $what: $1" >&2
    exit 1
}

# begin_build TOOL...: make the directory, and wait for a build that another process does there.
begin_build() {
    for tool in go flock "$@"; do
        command -v "$tool" >/dev/null 2>&1 || give_up "there is no $tool"
    done
    mkdir -p "$directory" || give_up "no directory $directory"
    exec 9>"$directory/lock"
    flock -w "$limit" 9 || give_up "another build is still running in $directory"
}

# download MODULE@VERSION: set `source` to where Go keeps the module, and `log` to the log of the build. The module is
# built there: nothing of it is copied, and its own go.sum decides what goes in.
download() {
    log=$directory/build.log
    export CGO_ENABLED=0
    (cd "$directory" && GOFLAGS=-mod=mod timeout "$limit" go mod download -json "$1") \
        >"$directory/module.json" 2>"$log" || give_up "$1 cannot be downloaded: $(tail -n 1 "$log")"
    source=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$directory/module.json")
    [ -d "$source" ] || give_up "Go does not say where $1 is"
}

# go_make PROGRAM PACKAGE OPTION...: build a package of the module in `source`. The program gets its name only when it
# is complete. With OPTION -c (go test), the tests of the package are built. `modules` and `flags` name another -mod and
# other -ldflags.
go_make() {
    program=$1 package=$2
    shift 2
    command=build
    [ "${1:-}" != -c ] || command=test
    (cd "$source" && GOFLAGS=-mod=${modules:-readonly} timeout "$limit" nice go $command \
        -p "${TOPOPROXY_GO_JOBS:-2}" -trimpath -buildvcs=false -ldflags "${flags:--s -w}" "$@" \
        -o "$program.new" "$package") >>"$log" 2>&1 || give_up "${program##*/}: $(tail -n 1 "$log")"
    mv "$program.new" "$program"
}
