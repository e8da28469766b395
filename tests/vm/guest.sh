#!/bin/bash
# Runs inside the virtual machine: set up a node, run the job, write its results to a disk, power off.
# As the first process (cgroup driver cgroupfs) this script mounts everything; otherwise systemd has done so.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export OUT=/out GOMAXPROCS=2 # idle threads of Go poll for work: expensive on emulated CPUs
. /in/.bed/settings.sh       # CGROUP, DRIVER, MODULES, GATEWAY, LIMIT_S

mount_cgroups() {
    local at=/sys/fs/cgroup controller
    if [ "$CGROUP" = v2 ]; then
        mount -t cgroup2 -o nsdelegate none $at
        echo "+cpuset +cpu +io +memory +hugetlb +pids" >$at/cgroup.subtree_control
        return
    fi
    mount -t tmpfs -o mode=755 none $at
    for controller in cpuset cpu,cpuacct memory devices freezer blkio pids hugetlb perf_event net_cls,net_prio name=systemd; do
        local name=${controller#name=} options=$controller
        [ "$name" = "$controller" ] || options=none,$controller
        mkdir $at/$name
        mount -t cgroup -o $options none $at/$name || rmdir $at/$name
    done
    ln -s cpu,cpuacct $at/cpu
    ln -s cpu,cpuacct $at/cpuacct
    [ "$CGROUP" = hybrid ] || return 0
    mkdir $at/unified
    mount -t cgroup2 none $at/unified
}

mount_all() {
    mount -t proc none /proc
    mount -t sysfs none /sys
    mount -t tmpfs -o mode=755 none /run
    mount -t tmpfs none /tmp
    mkdir -p /dev/pts /dev/shm
    mount -t devpts none /dev/pts
    mount -t tmpfs none /dev/shm
    ln -sf /proc/self/fd /dev/fd
    mount_cgroups
    mount --make-rshared /
    hostname bed
    ip link set lo up
}

start_network() {
    modprobe virtio_net
    ip link set eth0 up
    ip addr add "${GATEWAY%.*}.15/24" dev eth0
    ip route add default via "$GATEWAY"
}

start_containerd() {
    local driver=false tries=0
    [ "$DRIVER" = systemd ] && driver=true
    mkdir -p /etc/containerd
    sed "s/DRIVER/$driver/" /bed/containerd.toml >/etc/containerd/config.toml
    # By default a shim has two seconds to report its state; on a busy host that is too short, and containerd
    # then treats the sandbox as exited.
    cat >>/etc/containerd/config.toml <<'END'
[timeouts]
  "io.containerd.timeout.task.state" = "60s"
  "io.containerd.timeout.shim.load" = "60s"
  "io.containerd.timeout.shim.cleanup" = "60s"
  "io.containerd.timeout.shim.shutdown" = "30s"
END
    modprobe -a overlay $MODULES
    if [ "$DRIVER" = systemd ]; then
        systemctl set-environment GOMAXPROCS=$GOMAXPROCS
        systemctl start --no-block containerd
    else
        containerd >$OUT/containerd.log 2>&1 </dev/null &
        disown
    fi
    until ctr version >/dev/null 2>&1; do
        sleep 0.2
        tries=$((tries + 1))
        [ $tries -lt 600 ] || return 1
    done
}

[ $$ = 1 ] && mount_all
echo "UP $(cut -d' ' -f1 /proc/uptime)" >/dev/ttyS1
cd /in
{
    [ -z "$GATEWAY" ] || start_network
    if start_containerd; then
        timeout -k 5 "$LIMIT_S" bash /in/.bed/job.sh </dev/null
        echo $? >$OUT/.status
    else
        echo "containerd does not start"
        echo 99 >$OUT/.status
    fi
} 2>&1 | tee $OUT/.output >/dev/ttyS1
[ "$DRIVER" = systemd ] && journalctl -b -u containerd --no-pager >$OUT/containerd.log 2>/dev/null
tar c -C $OUT . >/dev/vdc
sync
if [ $$ = 1 ]; then
    for letter in s u o; do echo $letter >/proc/sysrq-trigger; done # sync, read-only, off
    sleep 60
fi
systemctl poweroff --force --force
