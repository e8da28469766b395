#!/bin/sh
# Undo "topoproxy attach" from its journal, without Python, topoproxy or its daemon.
#
#   /var/lib/topoproxy/rescue-detach [--force] [--root DIR]
#
# It stands beside its journal (the directory attach). Every file that the attach changed gets its bytes, mode, owner
# and time back, then kubelet is restarted, the units that the attach enabled are disabled, and those that it started
# are stopped. --force: in a file that another program changed since, only the endpoint goes back. --root: what stands
# for /.
# Exit codes: 0 undone, or nothing to undo; 1 it cannot be done; 2 the command line is wrong.
set -u
fail() {
    echo "rescue-detach: $1" >&2
    exit "${2:-1}"
}

force='' root=''
while [ $# -gt 0 ]; do
    case $1 in
        --force) force=1 ;;
        --root)
            [ $# -gt 1 ] || fail "--root needs a directory" 2
            root=${2%/}
            shift
            ;;
        *) fail "unknown option: $1" 2 ;;
    esac
    shift
done
here=$(cd "$(dirname "$0")" && pwd) || exit 1
journal=$here/attach
[ -e "$journal" ] || [ ! -e "$here/attach.old" ] || journal=$here/attach.old
if [ ! -e "$journal" ]; then
    echo "kubelet is not attached: there is nothing to undo"
    exit 0
fi
hand="change kubelet's container runtime endpoint by hand, and restart kubelet"
[ -f "$journal/complete" ] || fail "cannot read the journal in $journal: it is not complete; $hand"
unit=$(cat "$journal/unit") && endpoint=$(cat "$journal/endpoint") && previous=$(cat "$journal/previous") ||
    fail "cannot read the journal in $journal; $hand"
case $unit in
    '' | -* | *[!A-Za-z0-9@._-]*) fail "cannot read the journal in $journal: $unit is no unit; $hand" ;;
esac

sum() {
    if [ -e "$1" ]; then
        found=$(sha256sum "$1") || return 1
        echo "${found%% *}"
    else
        echo -
    fi
}

# First check everything, then change anything.
for entry in "$journal"/[0-9]*; do
    [ -f "$entry/path" ] || fail "cannot read the journal in $journal: $entry has no path; $hand"
    path=$(cat "$entry/path")
    case $path in
        /*) ;;
        *) fail "cannot read the journal in $journal: $path is not an absolute path; $hand" ;;
    esac
    before='' after=''
    read -r before after <"$entry/sums" || fail "cannot read $entry/sums; $hand"
    [ "$(sum "$entry/before") $(sum "$entry/after")" = "$before $after" ] ||
        fail "cannot undo the change of $path: its copy in $entry is damaged; $hand"
    now=$(sum "$root$path") || fail "cannot read $root$path"
    [ "$now" = "$before" ] || [ "$now" = "$after" ] || [ -n "$force" ] ||
        fail "another program changed $path since the attach; --force changes only the endpoint there"
done

replace() { # FILE: the endpoint in it, with the file's mode and owner kept
    old=$(printf '%s\n' "$endpoint" | sed 's/[][\.*^$|]/\\&/g')
    new=$(printf '%s\n' "$previous" | sed 's/[\&|]/\\&/g')
    cp -p "$1" "$1.rescue" && sed "s|$old|$new|g" "$1" >"$1.rescue" && mv -f "$1.rescue" "$1"
}

for entry in "$journal"/[0-9]*; do
    path=$(cat "$entry/path")
    read -r before after <"$entry/sums"
    now=$(sum "$root$path")
    if [ "$now" = "$before" ]; then
        continue
    elif [ "$before" = - ]; then
        rm -f "$root$path" || fail "cannot remove $root$path"
    elif [ "$now" = "$after" ] || [ "$now" = - ]; then
        cp -p "$entry/before" "$root$path.rescue" && mv -f "$root$path.rescue" "$root$path" ||
            fail "cannot restore $root$path"
        command -v restorecon >/dev/null 2>&1 && restorecon "$root$path"
    else
        replace "$root$path" || fail "cannot change $root$path"
    fi
    echo "restored $path"
done
for entry in "$journal"/[0-9]*; do
    made=''
    while read -r directory; do made="$root$directory
$made"; done <"$entry/made"
    printf '%s' "$made" | while read -r directory; do
        rmdir "$directory" 2>/dev/null || :
    done
done
sync
if [ "$(cat "$journal/state")" != begun ]; then
    systemctl daemon-reload && systemctl restart "$unit" ||
        fail "all files are as before the attach, but $unit was not restarted: systemctl restart $unit"
fi
running=''
[ ! -e "$journal/running" ] || running=$(cat "$journal/running")
while read -r enabled; do
    now=--now
    case "
$running
" in
        *"
$enabled
"*) now='' ;;
    esac
    [ -z "$enabled" ] || systemctl disable $now "$enabled" || echo "rescue-detach: $enabled is still enabled" >&2
done <"$journal/enabled"
if [ -e "$journal/started" ]; then # journals of earlier versions do not have it
    while read -r started; do
        [ -z "$started" ] || systemctl stop "$started" || echo "rescue-detach: $started still runs" >&2
    done <"$journal/started"
fi
rm -rf "$here/attach" "$here/attach.old" "$here/attach.new" "$here/attach.gone"
rm -f "$0"
echo "detached: kubelet uses $previous. Containers keep their cpusets; topoproxy release --offline gives them back"
