// memory SOURCES BYTES ITERATIONS: the sum of float32 arrays into another one, by all cores: N reads and one write.
// Variants: stores through the cache or past it, small or huge pages.
#include "common.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_SOURCES = 16, MOST_THREADS = 256 };

static float *sources[MOST_SOURCES];
static float *target;
static int source_count;
static size_t elements;
static int streaming;
static int threads;
static pthread_barrier_t begin, end;
static int over;

#ifdef __SSE2__
#include <emmintrin.h>
typedef __m128 Four;
static Four load(const float *at) { return _mm_load_ps(at); }
static void store(float *at, Four value) { streaming ? _mm_stream_ps(at, value) : _mm_store_ps(at, value); }
static void fence(void) { _mm_sfence(); }
#else
typedef float Four __attribute__((vector_size(16)));
static Four load(const float *at) { return *(const Four *)at; }
static void store(float *at, Four value) { *(Four *)at = value; }
static void fence(void) {}
#endif

static void reduce(size_t from, size_t to) {
    for (size_t i = from; i < to; i += 8) {
        Four low = load(sources[0] + i), high = load(sources[0] + i + 4);
        for (int s = 1; s < source_count; ++s) {
            low += load(sources[s] + i);
            high += load(sources[s] + i + 4);
        }
        store(target + i, low);
        store(target + i + 4, high);
    }
    fence();
}

static void *work(void *argument) {
    const size_t index = (size_t)argument;
    const size_t share = elements / (size_t)threads / 16 * 16;
    const size_t from = index * share, to = index + 1 == (size_t)threads ? elements : from + share;
    while (1) {
        pthread_barrier_wait(&begin);
        if (over) return NULL;
        reduce(from, to);
        pthread_barrier_wait(&end);
    }
}

static float *allocate(size_t bytes, int huge) {
    float *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    madvise(memory, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (size_t i = 0; i < bytes / sizeof *memory; ++i) memory[i] = 1.0f;
    return memory;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    source_count = atoi(argv[1]);
    const size_t bytes = strtoull(argv[2], NULL, 10) / 64 * 64;
    const int iterations = atoi(argv[3]);
    if (source_count < 1 || source_count > MOST_SOURCES || iterations < 1) return 2;
    elements = bytes / sizeof *target;
    threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    pthread_barrier_init(&begin, NULL, (unsigned)threads + 1);
    pthread_barrier_init(&end, NULL, (unsigned)threads + 1);
    pthread_t handles[MOST_THREADS];
    for (size_t i = 0; i < (size_t)threads; ++i) pthread_create(&handles[i], NULL, work, (void *)i);
    double *times = malloc((size_t)iterations * sizeof *times);
    for (int huge = 0; huge < 2; ++huge) {
        for (int s = 0; s < source_count; ++s) sources[s] = allocate(bytes, huge);
        target = allocate(bytes, huge);
        for (streaming = 0; streaming < 2; ++streaming) {
            for (int i = -2; i < iterations; ++i) {
                const double start = now();
                pthread_barrier_wait(&begin);
                pthread_barrier_wait(&end);
                if (i >= 0) times[i] = now() - start;
            }
            char name[64];
            snprintf(name, sizeof name, "%s pages, %s stores", huge ? "huge" : "small", streaming ? "streaming" : "cached");
            tell(name, median(times, iterations));
        }
        for (int s = 0; s < source_count; ++s) munmap(sources[s], bytes);
        munmap(target, bytes);
    }
    over = 1;
    pthread_barrier_wait(&begin);
    for (int i = 0; i < threads; ++i) pthread_join(handles[i], NULL);
    return 0;
}
