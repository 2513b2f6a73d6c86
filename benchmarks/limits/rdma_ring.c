// rdma_ring DEVICE GID_INDEX NODES BYTES ITERATIONS [PIECE EVENTS]: NODES processes add up BYTES of float32 on a bare ring of RDMA
// WRITEs with immediate, as fast as it can: each piece is added and passed on as soon as it has come, every step has
// its own landing place (so nothing is ever waited for but data), nothing is allocated or registered meanwhile.
// Variants: PIECE bytes per write, and waiting by completion events (1) or by polling (0); all of them by default.
#include "common.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

enum { MOST_NODES = 16, DEPTH = 512, MOST_DONE = 32 };

struct shared {
    pthread_barrier_t barrier;
    double times[MOST_NODES];
    struct place {
        uint32_t left, right, key; // its queue pairs, and the key of its memory
        uint64_t data, landing;
    } places[MOST_NODES];
};

struct ring {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct ibv_qp *right, *left; // to the next node, from the node before
    struct ibv_mr *memory;
    float *data, *landing;       // one region: the tensor, then a landing place for each step of the first half
    uint64_t data_there, landing_there;
    uint32_t key_there;
    int node, nodes, events;
    size_t bytes, block, piece, pieces;
    int sends;                   // posted and not completed
};

static void check(int error, const char *what) {
    if (error) {
        fprintf(stderr, "%s: %s\n", what, strerror(error));
        exit(1);
    }
}

static struct ibv_qp *queue_pair(struct ring *r) {
    struct ibv_qp_init_attr wanted = {
        .send_cq = r->queue, .recv_cq = r->queue, .qp_type = IBV_QPT_RC, .sq_sig_all = 0,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *made = ibv_create_qp(r->domain, &wanted);
    if (!made) fail("ibv_create_qp");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    check(ibv_modify_qp(made, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    return made;
}

static void join(struct ring *r, struct ibv_qp *qp, uint32_t other, int gid_index) {
    struct ibv_port_attr port;
    union ibv_gid gid;
    check(ibv_query_port(r->context, 1, &port), "ibv_query_port");
    check(ibv_query_gid(r->context, 1, gid_index, &gid), "ibv_query_gid");
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = other, .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = gid_index, .hop_limit = 64}}};
    check(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
    struct ibv_qp_attr ready = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    check(ibv_modify_qp(qp, &ready, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                        IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static void post_receive(struct ring *r) {
    struct ibv_recv_wr wanted = {0}, *bad;
    check(ibv_post_recv(r->left, &wanted, &bad), "ibv_post_recv");
}

static size_t length(const struct ring *r, size_t piece) {
    const size_t left = r->block - piece * r->piece;
    return left < r->piece ? left : r->piece;
}

// Pass piece number `piece` of the block that is due in `step` on to the next node.
static void put(struct ring *r, int step, size_t piece) {
    const int n = r->nodes;
    const size_t block = (size_t)((r->node - step + 2 * n) % n), at = block * r->block + piece * r->piece;
    const uint64_t there = step < n - 1
        ? r->landing_there + (uint64_t)step * r->block + piece * r->piece
        : r->data_there + at;
    struct ibv_sge part = {.addr = (uintptr_t)r->data + at, .length = (uint32_t)length(r, piece), .lkey = r->memory->lkey};
    struct ibv_send_wr wanted = {.sg_list = &part, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                                 .send_flags = IBV_SEND_SIGNALED, .imm_data = (uint32_t)(step * r->pieces + piece),
                                 .wr.rdma = {.remote_addr = there, .rkey = r->key_there}}, *bad;
    check(ibv_post_send(r->right, &wanted, &bad), "ibv_post_send");
    ++r->sends;
}

// A piece of `step` has come: add it if it is of the first half, pass it on unless it is at its end.
static void take(struct ring *r, int step, size_t piece) {
    const int n = r->nodes;
    if (step < n - 1) {
        const size_t block = (size_t)((r->node - step - 1 + 2 * n) % n);
        float *target = r->data + (block * r->block + piece * r->piece) / sizeof *target;
        const float *came = r->landing + ((size_t)step * r->block + piece * r->piece) / sizeof *came;
        const size_t count = length(r, piece) / sizeof *target;
        for (size_t i = 0; i < count; ++i) target[i] += came[i];
    }
    if (step + 1 < 2 * (n - 1)) put(r, step + 1, piece);
}

// Sleep until something has completed; return what has completed meanwhile, maybe nothing yet.
static int wait_for_event(struct ring *r, struct ibv_wc *done) {
    check(ibv_req_notify_cq(r->queue, 0), "ibv_req_notify_cq");
    // What came before the notification was asked for is not told.
    const int count = ibv_poll_cq(r->queue, MOST_DONE, done);
    if (count) return count;
    struct ibv_cq *queue;
    void *context;
    if (ibv_get_cq_event(r->channel, &queue, &context)) fail("ibv_get_cq_event");
    ibv_ack_cq_events(queue, 1);
    return 0;
}

static void all_reduce(struct ring *r) {
    const size_t total = (size_t)(2 * (r->nodes - 1)) * r->pieces;
    size_t came = 0;
    struct ibv_wc done[MOST_DONE];
    for (size_t piece = 0; piece < r->pieces; ++piece) put(r, 0, piece);
    while (came < total || r->sends) {
        int count = ibv_poll_cq(r->queue, MOST_DONE, done);
        if (!count && r->events) count = wait_for_event(r, done);
        if (count < 0) check(EIO, "ibv_poll_cq");
        for (int i = 0; i < count; ++i) {
            if (done[i].status) {
                fprintf(stderr, "completion: %s\n", ibv_wc_status_str(done[i].status));
                exit(1);
            }
            if (done[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
                post_receive(r);
                take(r, (int)(done[i].imm_data / r->pieces), done[i].imm_data % r->pieces);
                ++came;
            } else
                --r->sends;
        }
    }
}

static void check_result(const struct ring *r) {
    const size_t count = r->bytes / sizeof *r->data;
    for (size_t i = 0; i < count; ++i) {
        const float wanted = (float)(i % 1000) * (float)r->nodes + (float)(r->nodes * (r->nodes - 1) / 2);
        if (r->data[i] != wanted) {
            fprintf(stderr, "node %d has %g at %zu, not %g\n", r->node, r->data[i], i, wanted);
            exit(1);
        }
    }
}

static void measure(struct ring *r, struct shared *s, size_t piece, int events, int iterations) {
    r->piece = piece;
    r->pieces = (r->block + piece - 1) / piece;
    r->events = events;
    if ((size_t)(2 * (r->nodes - 1)) * r->pieces > DEPTH / 2) return;
    double times[iterations];
    for (int k = 0; k < iterations; ++k) {
        for (size_t i = 0; i < r->bytes / sizeof *r->data; ++i) r->data[i] = (float)(i % 1000) + (float)r->node;
        pthread_barrier_wait(&s->barrier);
        const double began = now();
        all_reduce(r);
        s->times[r->node] = now() - began;
        pthread_barrier_wait(&s->barrier);
        check_result(r);
        times[k] = 0;
        for (int node = 0; node < r->nodes; ++node) times[k] = s->times[node] > times[k] ? s->times[node] : times[k];
        pthread_barrier_wait(&s->barrier);
    }
    char variant[64];
    snprintf(variant, sizeof variant, "%zu KiB, %s", piece >> 10, events ? "events" : "polled");
    if (!r->node) tell(variant, median(times, iterations));
}

static void run(struct shared *s, const char *device, int gid_index, int node, int nodes, size_t bytes, int iterations,
                size_t only_piece, int only_events) {
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    struct ring r = {.node = node, .nodes = nodes, .bytes = bytes, .block = bytes / (size_t)nodes};
    for (int i = 0; i < count; ++i)
        if (!strcmp(ibv_get_device_name(devices[i]), device)) r.context = ibv_open_device(devices[i]);
    if (!r.context) fail(device);
    r.domain = ibv_alloc_pd(r.context);
    r.channel = ibv_create_comp_channel(r.context);
    r.queue = ibv_create_cq(r.context, 4 * DEPTH, NULL, r.channel, 0);
    if (!r.domain || !r.channel || !r.queue) fail("ibv_create_cq");
    const size_t all = bytes + (size_t)(nodes - 1) * r.block;
    r.data = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    r.landing = r.data + bytes / sizeof *r.data;
    r.memory = ibv_reg_mr(r.domain, r.data, all, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!r.memory) fail("ibv_reg_mr");
    r.right = queue_pair(&r);
    r.left = queue_pair(&r);
    s->places[node] = (struct place){r.left->qp_num, r.right->qp_num, r.memory->rkey, (uintptr_t)r.data,
                                     (uintptr_t)r.landing};
    pthread_barrier_wait(&s->barrier);
    const struct place next = s->places[(node + 1) % nodes];
    r.data_there = next.data, r.landing_there = next.landing, r.key_there = next.key;
    join(&r, r.right, next.left, gid_index);
    join(&r, r.left, s->places[(node + nodes - 1) % nodes].right, gid_index);
    for (int i = 0; i < DEPTH - 1; ++i) post_receive(&r);
    pthread_barrier_wait(&s->barrier);
    if (only_piece) {
        measure(&r, s, only_piece, only_events, iterations);
        return;
    }
    const size_t pieces[] = {128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20};
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; ++p)
        for (int events = 0; events < 2; ++events) measure(&r, s, pieces[p], events, iterations);
}

int main(int argc, char **argv) {
    if (argc != 6 && argc != 8) {
        fprintf(stderr, "usage: %s DEVICE GID_INDEX NODES BYTES ITERATIONS [PIECE EVENTS]\n", argv[0]);
        return 2;
    }
    const int nodes = atoi(argv[3]);
    const size_t bytes = strtoull(argv[4], NULL, 0);
    if (nodes < 2 || nodes > MOST_NODES || bytes % ((size_t)nodes * sizeof(float))) {
        fprintf(stderr, "2 to %d nodes, and BYTES is a multiple of 4 * NODES\n", MOST_NODES);
        return 2;
    }
    struct shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attr;
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->barrier, &attr, (unsigned)nodes);
    pid_t children[MOST_NODES];
    for (int node = 0; node < nodes; ++node) {
        children[node] = fork();
        if (children[node] < 0) fail("fork");
        if (!children[node]) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run(s, argv[1], atoi(argv[2]), node, nodes, bytes, atoi(argv[5]),
                argc > 6 ? strtoull(argv[6], NULL, 0) : 0, argc > 6 ? atoi(argv[7]) : 0);
            return 0;
        }
    }
    int failed = 0, status;
    while (wait(&status) > 0)
        if (status && !failed) {
            failed = 1; // the others would wait for it at the barrier
            for (int node = 0; node < nodes; ++node) kill(children[node], SIGKILL);
        }
    return failed;
}
