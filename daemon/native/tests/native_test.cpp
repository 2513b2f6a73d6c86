// Drives the kernels and the pool without Python, for the sanitizers. Buffers are exactly as long as the operands, so
// that every byte read or written beyond them is found.
#include <poll.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "instruction_set.h"
#include "pool.h"
#include "request.h"

namespace {

using allreduced::DType;
using allreduced::Pool;
using allreduced::Reduction;
using allreduced::Request;

void expect(bool condition, const std::string& what) {
    if (!condition) {
        std::fprintf(stderr, "failed: %s\n", what.c_str());
        std::exit(1);
    }
}

template <class Function>
void expect_refused(Function function, const std::string& what) {
    try {
        function();
    } catch (const std::invalid_argument&) {
        return;
    }
    expect(false, what + " was accepted");
}

std::int64_t code(DType dtype) { return static_cast<std::int64_t>(dtype); }
std::int64_t code(Reduction reduction) { return static_cast<std::int64_t>(reduction); }

std::uint64_t next_random() {
    static std::uint64_t state = 88172645463325252u;  // xorshift64, Marsaglia 2003
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

template <class T>
struct Traits;
template <>
struct Traits<float> {
    static constexpr DType dtype = DType::float32;
    using Wrapping = float;
};
template <>
struct Traits<double> {
    static constexpr DType dtype = DType::float64;
    using Wrapping = double;
};
template <>
struct Traits<std::int32_t> {
    static constexpr DType dtype = DType::int32;
    using Wrapping = std::uint32_t;
};
template <>
struct Traits<std::int64_t> {
    static constexpr DType dtype = DType::int64;
    using Wrapping = std::uint64_t;
};

template <class T>
T random_value() {
    const std::uint64_t bits = next_random();
    if constexpr (std::is_floating_point_v<T>) {
        using Limits = std::numeric_limits<T>;
        const T special[] = {T(0), T(-0.0), Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                             Limits::denorm_min(), -Limits::denorm_min(), Limits::max()};
        if (bits % 16 == 0) return special[bits / 16 % 8];
        return static_cast<T>(static_cast<std::int64_t>(bits)) * static_cast<T>(1e-18);
    } else {
        return static_cast<T>(bits);
    }
}

// `count` elements at an address that is `shift` bytes off, and not one byte more.
template <class T>
class Array {
   public:
    Array(std::size_t count, std::size_t shift) : bytes_(new unsigned char[count * sizeof(T) + shift]), shift_(shift) {
        for (std::size_t i = 0; i < count; ++i) set(i, random_value<T>());
    }
    unsigned char* data() const { return bytes_.get() + shift_; }
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data()); }
    T get(std::size_t i) const {
        T value;
        std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
        return value;
    }
    void set(std::size_t i, T value) { std::memcpy(data() + i * sizeof(T), &value, sizeof(T)); }

   private:
    std::unique_ptr<unsigned char[]> bytes_;
    std::size_t shift_;
};

template <class T>
T combine(Reduction reduction, T a, T b) {
    using Wrapping = typename Traits<T>::Wrapping;
    switch (reduction) {
        case Reduction::prod: return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
        case Reduction::min: return (a < b || a != a) ? a : b;
        case Reduction::max: return (a > b || a != a) ? a : b;
        default: return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
    }
}

template <class T>
bool same(T a, T b) {
    return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0;
}

template <class T>
void check_reduction(Reduction reduction, std::size_t sources, std::size_t count, std::size_t shift, bool in_place) {
    std::vector<Array<T>> arrays;
    std::vector<std::uintptr_t> addresses;
    for (std::size_t s = 0; s < sources; ++s) {
        arrays.emplace_back(count, (shift + s * shift) % 64);
        addresses.push_back(arrays.back().address());
    }
    const Array<T> apart(count, shift);
    std::vector<T> expected;
    for (std::size_t i = 0; i < count; ++i) {
        T value = arrays[0].get(i);
        for (std::size_t s = 1; s < sources; ++s) value = combine(reduction, value, arrays[s].get(i));
        expected.push_back(reduction == Reduction::mean ? value / static_cast<T>(3) : value);
    }
    const Array<T>& target = in_place ? arrays[sources / 2] : apart;
    const Request request(code(Traits<T>::dtype), code(reduction), 3, static_cast<std::int64_t>(count), addresses,
                          target.address());
    const std::size_t middle = count / 3;  // a range that starts anywhere
    request.run(0, middle);
    request.run(middle, count - middle);
    for (std::size_t i = 0; i < count; ++i) {
        expect(same(target.get(i), expected[i]),
               "dtype " + std::to_string(code(Traits<T>::dtype)) + " reduction " + std::to_string(code(reduction)) +
                   " sources " + std::to_string(sources) + " count " + std::to_string(count) + " at " +
                   std::to_string(i));
    }
}

template <class T>
void check_dtype() {
    for (const Reduction reduction : {Reduction::copy, Reduction::sum, Reduction::mean, Reduction::prod,
                                      Reduction::min, Reduction::max}) {
        if (reduction == Reduction::mean && !std::is_floating_point_v<T>) continue;
        for (const std::size_t sources : {1, 2, 3, 4, 5, 6, 7, 8, 9, 20}) {
            if (reduction == Reduction::copy && sources != 1) continue;
            for (const std::size_t count : {0, 1, 7, 63, 64, 65, 1000}) {
                check_reduction<T>(reduction, sources, count, 0, false);
                check_reduction<T>(reduction, sources, count, 1, false);
                check_reduction<T>(reduction, sources, count, 3, true);
            }
        }
    }
}

void check_refusals() {
    const std::uintptr_t some = 4096;
    expect_refused([&] { Request(0, 1, 1, 1, {some}, some); }, "dtype 0");
    expect_refused([&] { Request(-1, 1, 1, 1, {some}, some); }, "dtype -1");
    expect_refused([&] { Request(1, 99, 1, 1, {some}, some); }, "reduction 99");
    expect_refused([&] { Request(3, 2, 1, 1, {some}, some); }, "mean of int32");
    expect_refused([&] { Request(1, 1, 0, 1, {some}, some); }, "divisor 0");
    expect_refused([&] { Request(1, 1, 1, -1, {some}, some); }, "count -1");
    expect_refused([&] { Request(1, 1, 1, std::int64_t{1} << 62, {some}, some); }, "a huge count");
    expect_refused([&] { Request(1, 1, 1, 1, {}, some); }, "no source");
    expect_refused([&] { Request(1, 0, 1, 1, {some, some}, some); }, "copy of two");
    expect_refused([&] { Request(1, 1, 1, 1, {0}, some); }, "source at 0");
    expect_refused([&] { Request(1, 1, 1, 1, {some}, 0); }, "target at 0");
    expect_refused([&] { Pool(0, {}, 0); }, "no threads");
    expect_refused([&] { Pool(1, {-1}, 0); }, "cpu -1");
    expect_refused([&] { Pool(1, {}, 20); }, "nice 20");
}

bool readable(const Pool& pool, int timeout_ms) {
    pollfd wait = {pool.descriptor(), POLLIN, 0};
    return ::poll(&wait, 1, timeout_ms) == 1;
}

struct Work {
    Work(std::size_t count) : a(count, 4), b(count, 8), target(count, 12) {}
    Request request(std::size_t count) const {
        return Request(code(DType::float64), code(Reduction::sum), 1, static_cast<std::int64_t>(count),
                       {a.address(), b.address()}, target.address());
    }
    Array<double> a, b, target;
};

void check_pool_completes_each_job_once(int threads) {
    constexpr std::size_t kJobs = 200;
    Pool pool(threads, {}, 1);
    std::vector<std::unique_ptr<Work>> works;
    for (std::size_t job = 0; job < kJobs; ++job) {
        const std::size_t count = job % 50 == 0 ? 200003 : job * 7;
        works.push_back(std::make_unique<Work>(count));
        pool.submit(static_cast<std::int64_t>(job), works.back()->request(count), static_cast<std::int64_t>(job % 3));
    }
    std::map<std::int64_t, int> times;
    while (times.size() < kJobs) {
        expect(readable(pool, 60000), "a completion in time");
        for (const std::int64_t job : pool.completed()) ++times[job];
    }
    expect(!readable(pool, 0), "nothing more to read");
    for (const auto& [job, count] : times) {
        expect(count == 1, "job " + std::to_string(job) + " once");
        const Work& work = *works[static_cast<std::size_t>(job)];
        const std::size_t elements = job % 50 == 0 ? 200003 : static_cast<std::size_t>(job) * 7;
        for (std::size_t i = 0; i < elements; ++i) {
            expect(same(work.target.get(i), work.a.get(i) + work.b.get(i)), "the value of a job");
        }
    }
}

void check_pool_closes_with_jobs() {
    constexpr std::size_t kCount = 100000;
    std::vector<std::unique_ptr<Work>> works;
    for (int job = 0; job < 40; ++job) works.push_back(std::make_unique<Work>(kCount));
    Pool pool(2, {}, 0);
    for (int job = 0; job < 40; ++job) pool.submit(job, works[static_cast<std::size_t>(job)]->request(kCount), 0);
    pool.close();
    pool.close();
    for (const std::int64_t job : pool.completed()) {
        const Work& work = *works[static_cast<std::size_t>(job)];
        for (std::size_t i = 0; i < kCount; ++i) {
            expect(same(work.target.get(i), work.a.get(i) + work.b.get(i)), "a job that was reported is whole");
        }
    }
    expect(pool.descriptor() == -1, "no descriptor after close");
    expect_refused([&] { pool.submit(1, works[0]->request(1), 0); }, "submit after close");
    // The memory of what was dropped is ours again; the sanitizer would see a thread that still uses it.
}

// Threads inherit the flags of the thread that starts them, and a library with -ffast-math sets them.
void check_subnormals_are_kept() {
#if defined(__x86_64__)
    const unsigned int before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);  // flush to zero, subnormals are zero
    const double tiny = std::numeric_limits<double>::denorm_min();
    double target = 0;
    {
        Pool pool(1, {}, 0);
        const std::uintptr_t source = reinterpret_cast<std::uintptr_t>(&tiny);
        pool.submit(1, Request(code(DType::float64), code(Reduction::sum), 1, 1, {source, source},
                               reinterpret_cast<std::uintptr_t>(&target)), 0);
        expect(readable(pool, 60000), "a completion in time");
    }
    __builtin_ia32_ldmxcsr(before);
    expect(target == 2 * tiny, "subnormals are kept");
#endif
}

}  // namespace

int main() {
    check_dtype<float>();
    check_dtype<double>();
    check_dtype<std::int32_t>();
    check_dtype<std::int64_t>();
    check_refusals();
    check_subnormals_are_kept();
    for (const int threads : {1, 2, 5}) check_pool_completes_each_job_once(threads);
    for (int round = 0; round < 10; ++round) check_pool_closes_with_jobs();
    std::printf("ok on %s\n", allreduced::instruction_set());
    return 0;
}
