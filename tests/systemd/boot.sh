#!/bin/sh
# PID 1 of new namespaces: puts a throw-away copy of this machine's file system together and becomes systemd there.
# $1: an empty folder. $2: the Python installation. $3: the folder with the packages. $4: the folder of configs/systemd.
# $5: the folder that is shared with the tests.
set -eu
where=$1 python=$2 packages=$3 units=$4 shared=$5

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$where"
mkdir "$where/upper" "$where/work" "$where/root"
mount -t overlay -o "lowerdir=/,upperdir=$where/upper,workdir=$where/work" overlay "$where/root"
cd "$where/root"

mount -t tmpfs -o mode=755,nosuid,nodev tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs opt
mount -t tmpfs -o mode=755,nosuid tmpfs dev
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for name in null zero full random urandom tty; do
  touch "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd

# None of this machine's own services: what starts is what the test asks for.
mount -t tmpfs -o mode=755 tmpfs etc/systemd/system
: >etc/fstab
mkdir -p usr/lib/sysusers.d etc/allreduced
for unit in systemd-udevd.service systemd-udev-trigger.service systemd-networkd.service systemd-resolved.service \
  systemd-timesyncd.service systemd-logind.service systemd-remount-fs.service network-online.target; do
  ln -s /dev/null "etc/systemd/system/$unit"
done

mkdir -p opt/python opt/packages opt/shared opt/allreduced/bin
mount --bind "$python" opt/python
mount --bind "$packages" opt/packages
mount --bind "$shared" opt/shared
cat >opt/allreduced/bin/allreduced <<END
#!/bin/sh
PYTHONPATH=/opt/packages LD_LIBRARY_PATH=/opt/python/lib exec /opt/python/bin/python3 -P -m allreduced.cli.main "\$@"
END
chmod 755 opt/allreduced/bin/allreduced

# As docs/operations.md says.
install -Dm644 "$units/sysusers.conf" usr/lib/sysusers.d/allreduced.conf
install -Dm644 -t etc/systemd/system "$units/allreduced.service" "$units/allreduced.socket"

mkdir -p old
pivot_root . old
umount -l old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=allreduced-test \
  /lib/systemd/systemd --unit=basic.target --log-target=journal --show-status=no </dev/null >/dev/null 2>&1
