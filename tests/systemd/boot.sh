#!/bin/sh
# PID 1 of new namespaces: puts a throw-away copy of a file system together and becomes systemd there.
# $1: an empty folder. $2: the file system. $3: the Python installation, if not that of the file system. $4: the folder
# with the packages. $5: the folder of configs/systemd. $6: the folder that is shared with the tests.
set -eu
where=$1 lower=$2 python=$3 packages=$4 units=$5 shared=$6

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$where"
mkdir "$where/upper" "$where/work" "$where/root"
mount -t overlay -o "lowerdir=$lower,upperdir=$where/upper,workdir=$where/work" overlay "$where/root"
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

mkdir -p opt/packages opt/shared opt/allreduced/bin
interpreter=/usr/bin/python3
if [ -n "$python" ]; then
  mkdir opt/python
  mount --bind "$python" opt/python
  interpreter="env LD_LIBRARY_PATH=/opt/python/lib /opt/python/bin/python3"
fi
mount --bind "$packages" opt/packages
mount --bind "$shared" opt/shared
cat >opt/allreduced/bin/python <<END
#!/bin/sh
PYTHONPATH=/opt/packages exec $interpreter -P "\$@"
END
cat >opt/allreduced/bin/allreduced <<'END'
#!/bin/sh
exec /opt/allreduced/bin/python -m allreduced.cli.main "$@"
END
chmod 755 opt/allreduced/bin/*

# As docs/operations.md says.
install -Dm644 "$units/sysusers.conf" usr/lib/sysusers.d/allreduced.conf
install -Dm644 -t etc/systemd/system "$units/allreduced.service" "$units/allreduced.socket"

mkdir -p old
pivot_root . old
umount -l old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=allreduced-test \
  /lib/systemd/systemd --unit=basic.target --log-target=journal --show-status=no </dev/null >/dev/null 2>&1
