# Read by the guest's shell: makes the device rxe0 (soft-RoCE) on the interface rdma0 and sets NODES addresses on it,
# 10.77.0.1 … and fd77::1 …; each gives a GID. All agents of the guest share the device, an address each.
modprobe crc32_generic 2>/dev/null || true # where it is a module, rxe does not find it by itself
modprobe -a veth ib_uverbs rdma_rxe
ip link set lo up
ip link add rdma0 type veth peer name rdma1
ip link set rdma0 mtu 9000 # for the path MTU of 4096
ip link set rdma1 mtu 9000
sysctl -q net.ipv6.conf.rdma0.accept_dad=0 2>/dev/null || echo 0 >/proc/sys/net/ipv6/conf/rdma0/accept_dad
for node in $(seq "${NODES:-4}"); do
  ip address add "10.77.0.$node/24" dev rdma0
  ip address add "fd77::$node/64" dev rdma0
done
ip link set rdma1 up
ip link set rdma0 up
rdma link add rxe0 type rxe netdev rdma0
for attempt in $(seq 100); do
  grep -qi "$(printf '0a4d:%04x' "${NODES:-4}")" /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null && break
  sleep 0.05
done
