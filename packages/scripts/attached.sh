# A node whose kubelet still connects to topoproxy would lose its runtime with the package.
attached() {
    for state in $(state_dirs); do
        for place in "$root$state/attach" "$root$state/attach.old"; do
            if [ -e "$place" ]; then return 0; fi
        done
    done
    for place in "$root"/var/lib/kubelet/*.yaml "$root"/var/lib/kubelet/*.env "$root"/var/lib/kubelet/*.conf \
        "$root"/etc/default/kubelet "$root"/etc/sysconfig/kubelet "$root"/etc/kubernetes/kubelet.conf.d/*.conf \
        "$root"/etc/systemd/system/kubelet.service "$root"/etc/systemd/system/kubelet.service.d/*.conf \
        "$root"/usr/lib/systemd/system/kubelet.service.d/*.conf "$root"/etc/rancher/*/config.yaml \
        "$root"/etc/rancher/*/config.yaml.d/*.yaml \
        "$root"/var/snap/microk8s/current/args/kubelet; do
        if [ -f "$place" ] && grep -v '^[[:space:]]*#' "$place" | grep -Eqi 'endpoint.*topoproxy/crio?\.sock'; then
            return 0
        fi
    done
    return 1
}

refuse_if_attached() {
    if attached; then
        echo "topoproxy: cannot be removed while kubelet is attached to it: $place says so." >&2
        echo "topoproxy: run topoproxy detach (or rescue-detach in its state directory) first; TOPOPROXY_REMOVE_ATTACHED=yes removes it all the same." >&2
        [ "${TOPOPROXY_REMOVE_ATTACHED:-no}" = yes ] || exit 1
    fi
}
