#!/bin/sh
# Attach kubelet to topoproxy on a new node: from cloud-init (runcmd) or after "kubeadm join". It can be repeated.
#
#   bootstrap-node.sh [SECONDS [OPTION...]]
#
# It waits until the runtime and kubelet run (kubelet runs only after kubeadm has configured it), at most for SECONDS
# (600). OPTIONs are those of "topoproxy attach", such as --timeout 300. At later starts of the node, topoproxy.service
# sets the order: after containerd, before kubelet.
# TOPOPROXY_RUNTIME_UNIT and TOPOPROXY_KUBELET_UNIT name other units; on k3s, both are k3s.service.
set -eu
left=${1:-600}
[ $# -eq 0 ] || shift
for unit in "${TOPOPROXY_RUNTIME_UNIT:-containerd.service}" "${TOPOPROXY_KUBELET_UNIT:-kubelet.service}"; do
    until error=$(systemctl is-active --quiet "$unit" 2>&1); do
        # An error is printed if systemd does not answer. A running systemd may not answer for a moment, so the
        # directory decides whether it runs (sd_booted(3)).
        if [ -n "$error" ] && [ ! -d /run/systemd/system ]; then
            echo "bootstrap-node: cannot attach kubelet: systemd does not run: nothing is changed" >&2
            exit 1
        fi
        if [ "$left" -le 0 ]; then
            echo "bootstrap-node: $unit is not active: nothing is changed" >&2
            exit 1
        fi
        sleep 1
        left=$((left - 1))
    done
done
exec topoproxy attach --yes "$@"
