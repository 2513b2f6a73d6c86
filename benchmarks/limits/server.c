// server CLIENTS BYTES ITERATIONS: client processes send a float32 array each to one server over Unix sockets; the
// server adds them up and sends the sum to all. The time of an operation is that of its slowest client; a barrier (an
// empty operation) comes before each. Variants: processes anywhere, or all on one core.
#include "common.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_CLIENTS = 64, MOST_BYTES = 1 << 16 };

static void transfer(int sock, char *data, size_t bytes, int sending) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t moved = sending ? send(sock, data + done, bytes - done, MSG_NOSIGNAL)
                                      : recv(sock, data + done, bytes - done, MSG_WAITALL);
        if (moved <= 0) fail("transfer");
        done += (size_t)moved;
    }
}

static void operation(int sock, char *message, size_t bytes) {
    const uint32_t length = (uint32_t)bytes;
    memcpy(message, &length, sizeof length);
    transfer(sock, message, sizeof length + bytes, 1);
    transfer(sock, message, sizeof length + bytes, 0);
}

static void serve(const int *socks, int clients) {
    static char inputs[MOST_CLIENTS][MOST_BYTES + 4];
    static char result[MOST_BYTES + 4];
    const int poller = epoll_create1(0);
    for (int c = 0; c < clients; ++c) {
        struct epoll_event wanted = {.events = EPOLLIN, .data.u32 = (uint32_t)c};
        if (epoll_ctl(poller, EPOLL_CTL_ADD, socks[c], &wanted)) fail("epoll_ctl");
    }
    int arrived = 0;
    while (1) {
        struct epoll_event events[MOST_CLIENTS];
        const int ready = epoll_wait(poller, events, MOST_CLIENTS, -1);
        for (int e = 0; e < ready; ++e) {
            const uint32_t c = events[e].data.u32;
            const ssize_t got = recv(socks[c], inputs[c], sizeof inputs[c], 0);
            if (got <= 0) return;
            uint32_t bytes;
            memcpy(&bytes, inputs[c], sizeof bytes);
            if ((size_t)got < bytes + sizeof bytes) {
                transfer(socks[c], inputs[c] + got, bytes + sizeof bytes - (size_t)got, 0);
            }
            if (++arrived < clients) continue;
            arrived = 0;
            memcpy(result, inputs[0], bytes + sizeof bytes);
            for (int other = 1; other < clients; ++other) {
                for (size_t at = sizeof bytes; at < bytes + sizeof bytes; at += sizeof(float)) {
                    float sum, value;
                    memcpy(&sum, result + at, sizeof sum);
                    memcpy(&value, inputs[other] + at, sizeof value);
                    sum += value;
                    memcpy(result + at, &sum, sizeof sum);
                }
            }
            for (int target = 0; target < clients; ++target) transfer(socks[target], result, bytes + sizeof bytes, 1);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const int clients = atoi(argv[1]), iterations = atoi(argv[3]);
    const size_t bytes = strtoull(argv[2], NULL, 10) / 4 * 4;
    if (clients < 1 || clients > MOST_CLIENTS || bytes > MOST_BYTES || iterations < 1) return 2;
    const size_t count = (size_t)clients * (size_t)iterations;
    double *times = mmap(NULL, count * sizeof *times, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double *slowest = malloc((size_t)iterations * sizeof *slowest);
    for (int pinned = 0; pinned < 2; ++pinned) {
        int socks[MOST_CLIENTS];
        pid_t children[MOST_CLIENTS];
        for (int c = 0; c < clients; ++c) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) fail("socketpair");
            children[c] = fork();
            if (children[c] < 0) fail("fork");
            if (children[c] == 0) {
                for (int other = 0; other < c; ++other) close(socks[other]);
                close(pair[0]);
                if (pinned) pin(0);
                char *message = calloc(1, MOST_BYTES + 4);
                for (int i = -20; i < iterations; ++i) {
                    operation(pair[1], message, 0);
                    const double start = now();
                    operation(pair[1], message, bytes);
                    if (i >= 0) times[(size_t)c * (size_t)iterations + (size_t)i] = now() - start;
                }
                _exit(0);
            }
            close(pair[1]);
            socks[c] = pair[0];
        }
        const pid_t server = fork();
        if (server < 0) fail("fork");
        if (server == 0) {
            if (pinned) pin(0);
            serve(socks, clients);
            _exit(0);
        }
        for (int c = 0; c < clients; ++c) close(socks[c]);
        for (int c = 0; c < clients; ++c) waitpid(children[c], NULL, 0);
        waitpid(server, NULL, 0);
        for (int i = 0; i < iterations; ++i) {
            slowest[i] = 0;
            for (int c = 0; c < clients; ++c) {
                const double t = times[(size_t)c * (size_t)iterations + (size_t)i];
                if (t > slowest[i]) slowest[i] = t;
            }
        }
        tell(pinned ? "all on one core" : "anywhere", median(slowest, iterations));
    }
    return 0;
}
