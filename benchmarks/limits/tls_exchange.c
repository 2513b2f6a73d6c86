// tls_exchange BYTES ITERATIONS CERTIFICATE KEY: two processes send each other BYTES over loopback TCP at the same time, in
// TLS 1.3 with OpenSSL's default cipher suite, and each adds what it gets to what it has. Variants: OpenSSL reads and
// writes the socket itself, or buffers of this program that are received and sent in pieces of many records.
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

enum { PIECE = 256 << 10, RECORD = 16 << 10, OVERHEAD = 256 };

// One end of a connection. `piece`: bytes that are received and sent at once, 0 where OpenSSL has the socket.
typedef struct {
    int sock;
    size_t piece;
    SSL *tls;
    BIO_METHOD *method;
    char *received, *unsent;
    size_t received_from, received_to, unsent_from, unsent_to, unsent_room;
} End;

static void fail_tls(const char *what) {
    fprintf(stderr, "%s: ", what);
    ERR_print_errors_fp(stderr);
    exit(1);
}

// Give OpenSSL encrypted bytes that came; receive a piece where there are none.
static int read_received(BIO *bio, char *into, size_t bytes, size_t *done) {
    End *end = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    if (end->received_from == end->received_to) {
        const ssize_t came = recv(end->sock, end->received, end->piece, MSG_DONTWAIT);
        if (came == 0) exit(1);
        if (came < 0 && errno != EAGAIN) fail("recv");
        if (came < 0) {
            BIO_set_retry_read(bio);
            return 0;
        }
        end->received_from = 0;
        end->received_to = (size_t)came;
    }
    const size_t there = end->received_to - end->received_from;
    *done = bytes < there ? bytes : there;
    memcpy(into, end->received + end->received_from, *done);
    end->received_from += *done;
    return 1;
}

// Keep encrypted bytes until they are sent together.
static int write_unsent(BIO *bio, const char *from, size_t bytes, size_t *done) {
    End *end = BIO_get_data(bio);
    BIO_clear_retry_flags(bio);
    if (end->unsent_room - end->unsent_to < bytes) {
        BIO_set_retry_write(bio);
        return 0;
    }
    memcpy(end->unsent + end->unsent_to, from, bytes);
    end->unsent_to += bytes;
    *done = bytes;
    return 1;
}

static long control(BIO *bio, int command, long number, void *pointer) {
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

static BIO *buffers_of(End *end) {
    end->method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "pieces");
    BIO_meth_set_read_ex(end->method, read_received);
    BIO_meth_set_write_ex(end->method, write_unsent);
    BIO_meth_set_ctrl(end->method, control);
    BIO *bio = BIO_new(end->method);
    BIO_set_data(bio, end);
    BIO_set_init(bio, 1);
    return bio;
}

static void begin(End *end, int sock, size_t piece, bool listening, const char *certificate, const char *key) {
    SSL_CTX *context = SSL_CTX_new(listening ? TLS_server_method() : TLS_client_method());
    SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
    // A write that returned after each record would be followed by a poll each.
    SSL_CTX_set_mode(context, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | (piece ? 0 : SSL_MODE_ENABLE_PARTIAL_WRITE));
    if (SSL_CTX_use_certificate_chain_file(context, certificate) != 1) fail_tls(certificate);
    if (SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1) fail_tls(key);
    *end = (End){.sock = sock, .piece = piece, .tls = SSL_new(context)};
    SSL_set_fd(end->tls, sock);
    if ((listening ? SSL_accept(end->tls) : SSL_connect(end->tls)) != 1) fail_tls("handshake");
    fcntl(sock, F_SETFL, O_NONBLOCK);
    if (piece) {
        end->received = malloc(piece);
        end->unsent_room = piece + (piece / RECORD + 1) * OVERHEAD;
        end->unsent = malloc(end->unsent_room);
        BIO *bio = buffers_of(end);
        SSL_set_bio(end->tls, bio, bio);
    }
}

static void finish(End *end) {
    SSL_CTX *context = SSL_get_SSL_CTX(end->tls);
    SSL_free(end->tls);
    BIO_meth_free(end->method);  // after the BIO, which is freed with the SSL
    SSL_CTX_free(context);
    free(end->received);
    free(end->unsent);
}

// Give the kernel what is encrypted; tell whether it took all.
static bool flush(End *end) {
    while (end->unsent_from < end->unsent_to) {
        const ssize_t put = send(end->sock, end->unsent + end->unsent_from, end->unsent_to - end->unsent_from, MSG_NOSIGNAL);
        if (put < 0 && errno == EAGAIN) return false;
        if (put < 0) fail("send");
        end->unsent_from += (size_t)put;
    }
    end->unsent_from = end->unsent_to = 0;
    return true;
}

// Send up to so many bytes and return how many were taken, 0 where the kernel has no room.
static size_t put(End *end, const char *from, size_t bytes) {
    const size_t most = end->piece ? end->piece : PIECE;
    size_t taken = 0;
    if (end->piece && !flush(end)) return 0;
    if (SSL_write_ex(end->tls, from, bytes < most ? bytes : most, &taken) != 1) {
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
        if (SSL_read_ex(end->tls, into + all, room - all, &got) != 1) {
            if (SSL_get_error(end->tls, 0) != SSL_ERROR_WANT_READ) fail_tls("read");
            break;
        }
        all += got;
    }
    return all;
}

static void exchange(End *end, const char *out, float *own, char *chunk, size_t bytes) {
    size_t sent = 0, received = 0, filled = 0;
    while (sent < bytes || received < bytes || end->unsent_from < end->unsent_to) {
        size_t moved = 0;
        if (received < bytes) {
            const size_t left = bytes - received;
            const size_t got = get(end, chunk + filled, left < PIECE - filled ? left : PIECE - filled);
            filled += got;
            received += got;
            moved += got;
            if (filled == PIECE || received == bytes) {
                const float *source = (const float *)chunk;
                float *target = own + (received - filled) / sizeof *own;
                for (size_t i = 0; i < filled / sizeof *own; ++i) target[i] += source[i];
                filled = 0;
            }
        }
        if (sent < bytes) {
            const size_t taken = put(end, out + sent, bytes - sent);
            sent += taken;
            moved += taken;
        } else {
            flush(end);
        }
        if (moved) continue;  // a poll costs as much as many a record
        const bool sends = sent < bytes || end->unsent_from < end->unsent_to;
        struct pollfd ready = {end->sock, (short)((sends ? POLLOUT : 0) | (received < bytes ? POLLIN : 0)), 0};
        if ((sends || received < bytes) && poll(&ready, 1, -1) < 0) fail("poll");
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
    End end;
    begin(&end, sock, piece, child != 0, certificate, key);
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
