// exchange BYTES ITERATIONS: two processes send each other BYTES over loopback TCP at the same time, and each adds what
// it gets to what it has. Variants: bytes per call, sizes of the socket buffers (0: the system's own).
#include "common.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void add(float *target, const float *source, size_t count) {
    for (size_t i = 0; i < count; ++i) target[i] += source[i];
}

static void exchange(int sock, const char *out, float *own, char *chunk, size_t bytes, size_t piece) {
    size_t sent = 0, received = 0, filled = 0;
    while (sent < bytes || received < bytes) {
        struct pollfd ready = {sock, (short)((sent < bytes ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)), 0};
        if (poll(&ready, 1, -1) < 0) fail("poll");
        if (ready.revents & (POLLIN | POLLHUP | POLLERR) && received < bytes) {
            const size_t left = bytes - received;
            const size_t wanted = (left < piece - filled ? left : piece - filled);
            const ssize_t got = recv(sock, chunk + filled, wanted, MSG_DONTWAIT);
            if (got < 0 && errno != EAGAIN) fail("recv");
            if (got == 0) exit(1);
            if (got > 0) {
                filled += (size_t)got;
                received += (size_t)got;
                if (filled == piece || received == bytes) {
                    add(own + (received - filled) / sizeof *own, (const float *)chunk, filled / sizeof *own);
                    filled = 0;
                }
            }
        }
        if (ready.revents & POLLOUT) {
            const size_t wanted = bytes - sent < piece ? bytes - sent : piece;
            const ssize_t put = send(sock, out + sent, wanted, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (put < 0 && errno != EAGAIN) fail("send");
            if (put > 0) sent += (size_t)put;
        }
    }
}

static void synchronize(int sock) {
    char byte = 0;
    if (send(sock, &byte, 1, 0) != 1 || recv(sock, &byte, 1, MSG_WAITALL) != 1) fail("synchronize");
}

static void set_buffers(int sock, int bytes) {
    if (!bytes) return;
    setsockopt(sock, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(sock, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

static void run(int sock, size_t bytes, int iterations, int buffer, int report) {
    const size_t pieces[] = {256 << 10, 512 << 10, 1 << 20};
    char *out = malloc(bytes), *chunk = malloc(1 << 20);
    float *own = malloc(bytes);
    double *times = malloc((size_t)iterations * sizeof *times);
    memset(out, 0, bytes);
    memset(own, 0, bytes);
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; ++p) {
        for (int i = -2; i < iterations; ++i) {
            synchronize(sock);
            const double start = now();
            exchange(sock, out, own, chunk, bytes, pieces[p]);
            double mine = now() - start, other = 0;
            if (send(sock, &mine, sizeof mine, 0) != sizeof mine) fail("send");
            if (recv(sock, &other, sizeof other, MSG_WAITALL) != sizeof other) fail("recv");
            if (i >= 0) times[i] = mine > other ? mine : other;
        }
        char name[64];
        snprintf(name, sizeof name, "%zu KiB a call, buffers of %d KiB", pieces[p] >> 10, buffer >> 10);
        if (report) tell(name, median(times, iterations));
    }
    free(out);
    free(chunk);
    free(own);
    free(times);
}

// Runs the exchanges over a connection of its own. `buffer`: bytes of its send and receive buffers, 0 for the system's.
static int connected(size_t bytes, int iterations, int buffer) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    set_buffers(listener, buffer);  // accepted connections inherit them
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    const pid_t child = fork();
    if (child < 0) fail("fork");
    const int sock = child ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
    if (!child) {
        set_buffers(sock, buffer);
        if (connect(sock, (struct sockaddr *)&address, length)) fail("connect");
    }
    const int one = 1;
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    run(sock, bytes, iterations, buffer, child != 0);
    if (!child) _exit(0);
    close(sock);
    close(listener);
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const size_t bytes = strtoull(argv[1], NULL, 10) / 4 * 4;
    const int iterations = atoi(argv[2]);
    if (bytes < 4 || iterations < 1) return 2;
    return connected(bytes, iterations, 0) || connected(bytes, iterations, 1 << 20) ||
           connected(bytes, iterations, 4 << 20);
}
