// tls_exchange BYTES ITERATIONS CERTIFICATE KEY: two processes send each other BYTES over loopback TCP at the same time, in
// TLS 1.3 with OpenSSL's default cipher suite, and each adds what it gets to what it has. Variants: OpenSSL reads and
// writes the socket itself, or memory that is received and sent in pieces.
#include "common.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIECE = 256 << 10, RECORD = 16 << 10 };

// One end of a connection. `piece`: bytes that are received and sent at once, 0 where OpenSSL has the socket.
typedef struct {
    int sock;
    size_t piece;
    SSL *tls;
    BIO *incoming, *outgoing;
    char *received, *unsent;
    size_t unsent_from, unsent_to;
} End;

static void fail_tls(const char *what) {
    fprintf(stderr, "%s: ", what);
    ERR_print_errors_fp(stderr);
    exit(1);
}

static End begin(int sock, size_t piece, bool listening, const char *certificate, const char *key) {
    SSL_CTX *context = SSL_CTX_new(listening ? TLS_server_method() : TLS_client_method());
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    if (SSL_CTX_use_certificate_chain_file(context, certificate) != 1) fail_tls(certificate);
    if (SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1) fail_tls(key);
    End end = {.sock = sock, .piece = piece, .tls = SSL_new(context)};
    SSL_set_fd(end.tls, sock);
    if ((listening ? SSL_accept(end.tls) : SSL_connect(end.tls)) != 1) fail_tls("handshake");
    fcntl(sock, F_SETFL, O_NONBLOCK);
    if (piece) {
        end.incoming = BIO_new(BIO_s_mem());
        end.outgoing = BIO_new(BIO_s_mem());
        end.received = malloc(piece);
        end.unsent = malloc(4 * piece);
        SSL_set_bio(end.tls, end.incoming, end.outgoing);
    }
    return end;
}

static void finish(End *end) {
    SSL_CTX *context = SSL_get_SSL_CTX(end->tls);
    SSL_free(end->tls);
    SSL_CTX_free(context);
    free(end->received);
    free(end->unsent);
}

// Give the kernel what is encrypted; tell whether it took all.
static bool flush(End *end) {
    for (;;) {
        if (end->unsent_from == end->unsent_to) {
            const int taken = BIO_read(end->outgoing, end->unsent, (int)(4 * end->piece));
            if (taken <= 0) return true;
            end->unsent_from = 0;
            end->unsent_to = (size_t)taken;
        }
        const ssize_t put = send(end->sock, end->unsent + end->unsent_from, end->unsent_to - end->unsent_from, MSG_NOSIGNAL);
        if (put < 0 && errno == EAGAIN) return false;
        if (put < 0) fail("send");
        end->unsent_from += (size_t)put;
    }
}

// Send up to so many bytes and return how many were taken, 0 where the kernel has no room.
static size_t put(End *end, const char *from, size_t bytes) {
    size_t taken = 0;
    if (end->piece && !flush(end)) return 0;
    if (SSL_write_ex(end->tls, from, bytes < PIECE ? bytes : PIECE, &taken) != 1) {
        if (SSL_get_error(end->tls, 0) != SSL_ERROR_WANT_WRITE) fail_tls("write");
        return 0;
    }
    if (end->piece) flush(end);
    return taken;
}

// Receive up to so many bytes and return how many came, 0 where there are none now.
static size_t get(End *end, char *into, size_t room) {
    size_t all = 0;
    while (all < room) {
        size_t got = 0;
        if (SSL_read_ex(end->tls, into + all, room - all, &got) == 1) {
            all += got;
            continue;
        }
        if (SSL_get_error(end->tls, 0) != SSL_ERROR_WANT_READ) fail_tls("read");
        if (!end->piece) break;
        const ssize_t came = recv(end->sock, end->received, end->piece, 0);
        if (came < 0 && errno == EAGAIN) break;
        if (came < 0) fail("recv");
        if (came == 0) exit(1);
        BIO_write(end->incoming, end->received, (int)came);
    }
    return all;
}

static bool pending(const End *end) {
    return SSL_pending(end->tls) > 0 || (end->piece && BIO_pending(end->incoming) > 0);
}

static void exchange(End *end, const char *out, float *own, char *chunk, size_t bytes) {
    size_t sent = 0, received = 0, filled = 0;
    bool more = false;
    while (sent < bytes || received < bytes || end->unsent_from < end->unsent_to) {
        const bool sends = sent < bytes || end->unsent_from < end->unsent_to;
        struct pollfd ready = {end->sock, (short)((sends ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)), 0};
        if (poll(&ready, 1, more ? 0 : -1) < 0) fail("poll");
        if ((more || ready.revents & (POLLIN | POLLHUP | POLLERR)) && received < bytes) {
            const size_t left = bytes - received;
            const size_t got = get(end, chunk + filled, left < PIECE - filled ? left : PIECE - filled);
            filled += got;
            received += got;
            if (filled == PIECE || received == bytes) {
                const float *source = (const float *)chunk;
                float *target = own + (received - filled) / sizeof *own;
                for (size_t i = 0; i < filled / sizeof *own; ++i) target[i] += source[i];
                filled = 0;
            }
        }
        if (ready.revents & POLLOUT) {
            if (sent < bytes)
                sent += put(end, out + sent, bytes - sent);
            else
                flush(end);
        }
        more = received < bytes && pending(end);
    }
}

static void synchronize(End *end) {
    char byte = 0;
    while (put(end, &byte, 1) != 1) {}
    while (end->piece && !flush(end)) {}
    while (get(end, &byte, 1) != 1) {
        struct pollfd ready = {end->sock, POLLIN, 0};
        if (poll(&ready, 1, -1) < 0) fail("poll");
    }
}

static void run(End *end, size_t bytes, int iterations, bool report) {
    char *out = malloc(bytes), *chunk = malloc(PIECE);
    float *own = malloc(bytes);
    double *times = malloc((size_t)iterations * sizeof *times);
    memset(out, 0, bytes);
    memset(own, 0, bytes);
    for (int i = -2; i < iterations; ++i) {
        synchronize(end);
        const double start = now();
        exchange(end, out, own, chunk, bytes);
        synchronize(end);  // the slower of the two
        if (i >= 0) times[i] = now() - start;
    }
    char name[64] = "OpenSSL has the socket";
    if (end->piece) snprintf(name, sizeof name, "%zu KiB of records at once", end->piece >> 10);
    if (report) tell(name, median(times, iterations));
    free(out);
    free(chunk);
    free(own);
    free(times);
}

static int connected(size_t bytes, int iterations, size_t piece, const char *certificate, const char *key) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    const pid_t child = fork();
    if (child < 0) fail("fork");
    const int sock = child ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
    if (!child && connect(sock, (struct sockaddr *)&address, length)) fail("connect");
    const int one = 1;
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    End end = begin(sock, piece, child != 0, certificate, key);
    run(&end, bytes, iterations, child != 0);
    finish(&end);
    if (!child) _exit(0);
    close(sock);
    close(listener);
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    const size_t bytes = strtoull(argv[1], NULL, 10) / 4 * 4;
    const int iterations = atoi(argv[2]);
    if (bytes < 4 || iterations < 1) return 2;
    const size_t pieces[] = {0, 64 << 10, 256 << 10};
    for (size_t p = 0; p < sizeof pieces / sizeof *pieces; ++p)
        if (connected(bytes, iterations, pieces[p], argv[3], argv[4])) return 1;
    return 0;
}
