#!/bin/sh
# Bring the node on which this pod runs to a state: node.sh attached|installed|absent.
#
# It waits for its turn, changes the node, and releases the turn. Each step is repeatable. If a step fails, the changes
# that this script made are undone. Then the script ends with 1, kubelet restarts the container later, and the turn
# stays with this node: no other node is changed until this one is repaired or the Helm release is changed.
set -eu

state=$1
packages=${PACKAGES:-/packages}
scripts=${SCRIPTS:-/scripts}
ready=${READY:-/tmp/ready}
python=${PYTHON:-/usr/lib/topoproxy/bin/python}
keep=/var/lib/topoproxy-installer
drop_in=/etc/topoproxy/config.d/90-helm.yaml

host() { ${HOST-nsenter --target 1 --mount --uts --ipc --net --pid --} "$@"; }
say() { echo "node $NODE_NAME: $*"; }

case $state in absent | installed | attached) ;;
*)
    say "there is no state $state" >&2
    exit 2
    ;;
esac

# A shell handles a signal only after the program in its foreground has ended, so these programs run in the background.
# A signal that arrives while a program is started is handled once its process id is known.
child='' holder='' starting='' stopping=''
started() {
    starting=''
    [ -z "$stopping" ] || exit 143
}
stop() {
    say "received a signal to stop"
    stopping=yes
    [ -n "$starting" ] || exit 143
}
turn() {
    starting=yes
    "$python" "$scripts/turn.py" "$1" "$TURN" "$NODE_NAME" "$TURN_SECONDS" $$ &
    child=$!
    started
    wait "$child" || return
    child=''
}
hold() {
    starting=yes
    "$python" "$scripts/turn.py" hold "$TURN" "$NODE_NAME" "$TURN_SECONDS" $$ &
    holder=$!
    started
}
# SIGTERM is lost in a child that still is a copy of this shell, with its trap.
end() {
    kill -9 "$1" 2>/dev/null || :
    wait "$1" 2>/dev/null || : # busybox prints how it ended
}
# The node is not being changed while a child takes or releases the turn.
finish() {
    [ -z "$holder" ] || end "$holder"
    [ -n "$child" ] || return 0
    end "$child"
    "$python" "$scripts/turn.py" drop "$TURN" "$NODE_NAME" "$TURN_SECONDS" $$ || :
}

# The commands of the node's package manager.
if host sh -c 'command -v dpkg >/dev/null'; then
    kind=deb
    case $(host uname -m) in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; *) arch=unknown ;; esac
    file="$packages/topoproxy_*_$arch.deb"
    # Dependencies are the node's: nothing is downloaded.
    install_file() { host dpkg --force-downgrade --install "$1"; }
    purge() { host dpkg --purge topoproxy; }
    is_installed() { host dpkg-query -W -f '${Status}' topoproxy 2>/dev/null | grep -q ' installed$'; }
elif host sh -c 'command -v rpm >/dev/null'; then
    kind=rpm
    file="$packages/topoproxy-*.$(host uname -m).rpm"
    install_file() { host rpm --upgrade --oldpackage --replacepkgs "$1"; }
    # A file system that is mounted at the state directory cannot be removed, only emptied.
    purge() {
        host rpm --erase topoproxy && host rm -rf /etc/topoproxy &&
            host sh -c 'rm -rf "$1" || [ -z "$(ls -A "$1")" ]' sh /var/lib/topoproxy
    }
    is_installed() { host rpm --quiet -q topoproxy; }
else
    say "has neither dpkg nor rpm: install topoproxy from the wheel" >&2
    exit 1
fi

# The state directory, according to the configuration on the node.
state_dir() {
    found=$(host sh -c 'cat "$@" 2>/dev/null' sh /etc/topoproxy/config.yaml $drop_in |
        sed -n "s|^stateDir:[[:space:]]*[\"']\{0,1\}\(/[^\"'#[:space:]]*\).*|\1|p" | tail -n 1)
    echo "${found:-/var/lib/topoproxy}"
}

# The journal of topoproxy attach is there as long as kubelet is attached.
attached() { host test -e "$(state_dir)/attach"; }

# Put a file onto the node: name, content from standard input.
put() { host sh -c 'umask 022; mkdir -p "$(dirname "$1")" && cat >"$1.new" && mv "$1.new" "$1"' sh "$1"; }

main_pid() { host systemctl show --property MainPID --value topoproxy.service; }

install_package() {
    # shellcheck disable=SC2086  # the pattern is to be expanded
    set -- $file
    [ -f "$1" ] || { say "the image has no package $file" >&2; return 1; }
    sum=$(sha256sum <"$1") || return 1
    if is_installed && [ "$(host cat $keep/sum 2>/dev/null)" = "$sum" ]; then
        say "the package is installed"
        return 0
    fi
    put "$keep/next.$kind" <"$1" || return 1
    daemon=$(main_pid)
    if install_file "$keep/next.$kind"; then
        changed=yes
        return 0
    fi
    say "the package cannot be installed" >&2
    changed=yes
    return 1
}

revert_package() {
    [ "${changed:-no}" = yes ] || return 0
    if host test -f "$keep/current.$kind"; then
        say "the package before is installed again"
        install_file "$keep/current.$kind" || say "it cannot be installed" >&2
    elif [ "$was_installed" = yes ]; then
        say "there is no copy of the package before: the new one stays" >&2
    else
        say "the package is removed again"
        purge || say "it cannot be removed" >&2
    fi
}

keep_package() {
    [ "${changed:-no}" = yes ] || return 0
    host mv "$keep/next.$kind" "$keep/current.$kind"
    echo "$sum" | put "$keep/sum"
}

# set -e is not in effect in functions whose result is tested: each step says what happens if it fails.
configure() {
    if host test -f $drop_in; then host cp -p $drop_in $keep/drop-in || return 1; else host rm -f $keep/drop-in; fi
    if [ -s "$scripts/config.yaml" ]; then
        put $drop_in <"$scripts/config.yaml" || return 1
    else
        host rm -f $drop_in || return 1
    fi
    host topoproxy check-config >/dev/null
}

revert_configuration() {
    if host test -f $keep/drop-in; then host cp -p $keep/drop-in $drop_in; else host rm -f $drop_in; fi
}

# A daemon that is replaced reads all settings, and no call fails; 69: it cannot be replaced.
replace_daemon() {
    host topoproxy upgrade --now && code=0 || code=$?
    [ "$code" = 69 ] || return "$code"
    host systemctl restart topoproxy.service
}

# Installing a package replaces a running daemon. dpkg and rpm do not report if that failed, but the process is the same
# then. The replacement is tried again, with the configuration that is in place now.
replace_former() {
    [ "${changed:-no}" = yes ] && [ "${daemon:-0}" != 0 ] && [ "$(main_pid)" = "$daemon" ] || return 0
    say "the package has not replaced the daemon, which is tried again"
    replace_daemon
}

# A reload is also refused (78) if settings that need no restart are only valid together with settings that need one.
reload() {
    page=$(host topoproxy reload --json) && code=0 || code=$?
    case $code,$page in
    0,*'"restart": []'*) return 0 ;;
    0,* | 78,*) say "settings need a restart, the daemon is replaced" ;;
    69,*)
        say "the daemon does not answer, it is restarted"
        host systemctl restart topoproxy.service
        return
        ;;
    *) return 1 ;;
    esac
    replace_daemon
}

attach() {
    # An attach that was cut off may have left no daemon: the next attach starts it, and it reads the configuration.
    if [ "$(host cat "$(state_dir)/attach/state" 2>/dev/null)" = attached ]; then
        reload || return 1
    fi
    # The attach undoes itself if kubelet's calls do not arrive. On an attached node it sets an endpoint that was reset.
    host topoproxy attach --yes --timeout "$ATTACH_TIMEOUT" || return 1
    host topoproxy status --wait-ready="${ATTACH_TIMEOUT}s" >/dev/null
}

failed() {
    say "$1 failed, the node is reverted" >&2
    if [ "${before:-}" = detached ] && attached; then host topoproxy detach --yes || :; fi
    [ "${configured:-no}" = no ] || revert_configuration
    revert_package
    if [ "${before:-}" = attached ]; then reload || say "the configuration before cannot be loaded" >&2; fi
    exit 1
}

rm -f "$ready"
trap stop TERM INT
trap finish EXIT
turn take
hold
before=detached was_installed=no
if is_installed; then was_installed=yes; fi
if [ $was_installed = yes ] && attached; then before=attached; fi
case $state in
absent)
    if [ $was_installed = yes ]; then
        if [ $before = attached ]; then host topoproxy detach --yes; fi
        purge
    fi
    host rm -rf $keep
    ;;
installed | attached)
    install_package || failed "the installation"
    configured=yes
    configure || failed "the check of the configuration"
    replace_former || failed "replacing the daemon"
    if [ "$state" = attached ]; then attach || failed "attaching"; fi
    keep_package
    ;;
esac
end "$holder"
holder=''
turn release
touch "$ready"
say "is $state"
[ "${ONCE:-no}" = no ] || exit 0
while :; do
    starting=yes
    sleep 3600 &
    holder=$!
    started
    wait "$holder"
done
