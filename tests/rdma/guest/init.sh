#!/bin/busybox sh
# The guest's first process. Shows the host's files at their own places under a layer that can be written, runs the
# command there and tells its status on the console: GUEST-UP when it is about to, GUEST-STATUS n at the end.
b=/bin/busybox
fail() { echo "GUEST-FAILED $*"; $b poweroff -f; }

$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do $b insmod "$module" || fail "insmod $module"; done
for word in $($b cat /proc/cmdline); do
  case $word in guest.modules=*) modules=${word#*=} ;; esac
done

share=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $share,cache=loose,ro host /lower || fail "the host's files"
$b mount -t tmpfs -o size=60% layer /layer && $b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work overlay /root || fail "the writable layer"

$b mount -t proc proc /root/proc
$b mount -t sysfs sysfs /root/sys
$b mount -t devtmpfs devtmpfs /root/dev
$b mkdir -p /root/dev/shm /root/dev/pts /root/lib/modules /root/run/guest
$b mount -t tmpfs shm /root/dev/shm
$b mount -t devpts devpts /root/dev/pts
$b mount -t tmpfs run /root/run
$b mkdir /root/run/guest
$b mount -t 9p -o $share out /root/run/guest || fail "the folder of results"
$b mount --bind "/root$modules" /root/lib/modules || fail "the modules"
$b ln -sf /proc/self/fd /root/dev/fd

echo GUEST-UP
$b chroot /root /bin/sh /run/guest/command </dev/null
echo "GUEST-STATUS $?"
$b sync
$b poweroff -f
