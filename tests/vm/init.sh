#!/bin/busybox sh
# The first process: load the disks' drivers, mount the system, unpack what this run brings, and go on there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
for module in /mod/*; do $b insmod "$module"; done
tries=0
while [ ! -b /dev/vdc ] && [ $tries -lt 200 ]; do $b sleep 0.05; tries=$((tries + 1)); done
$b mount -t ext4 -o noatime /dev/vda /new
$b tar x -C /new/in -f /dev/vdb
first=/in/.bed/guest.sh
$b grep -q bed.init=systemd /proc/cmdline && first=/lib/systemd/systemd
$b mount --move /dev /new/dev
$b umount /proc
exec $b switch_root /new "$first"
