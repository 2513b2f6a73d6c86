// Drives the kernels and the pool without Python, for the sanitizers. Buffers are exactly as long as the operands, so
// that every byte read or written beyond them is found.
#include <poll.h>

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
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

// One element in memory, `T`, and the number it is computed with, `Number`.
template <class T>
struct Plain {
    using Number = T;
    static Number number(T value) { return value; }
    static T element(Number value) { return value; }
};

template <DType kDType>
struct Traits;
template <> struct Traits<DType::float32> : Plain<float> { using Element = float; };
template <> struct Traits<DType::float64> : Plain<double> { using Element = double; };
template <> struct Traits<DType::int8> : Plain<std::int8_t> { using Element = std::int8_t; };
template <> struct Traits<DType::int16> : Plain<std::int16_t> { using Element = std::int16_t; };
template <> struct Traits<DType::int32> : Plain<std::int32_t> { using Element = std::int32_t; };
template <> struct Traits<DType::int64> : Plain<std::int64_t> { using Element = std::int64_t; };
template <> struct Traits<DType::uint8> : Plain<std::uint8_t> { using Element = std::uint8_t; };
template <> struct Traits<DType::uint16> : Plain<std::uint16_t> { using Element = std::uint16_t; };
template <> struct Traits<DType::uint32> : Plain<std::uint32_t> { using Element = std::uint32_t; };
template <> struct Traits<DType::uint64> : Plain<std::uint64_t> { using Element = std::uint64_t; };
template <> struct Traits<DType::complex64> : Plain<std::complex<float>> { using Element = std::complex<float>; };
template <> struct Traits<DType::complex128> : Plain<std::complex<double>> { using Element = std::complex<double>; };

// Bytes of bool and halves of 16-bit floats, types of their own.
enum class Byte : std::uint8_t {};
enum class Half : std::uint16_t {};
enum class Brain : std::uint16_t {};

template <>
struct Traits<DType::boolean> {
    using Element = Byte;
    using Number = bool;
    static bool number(Byte value) { return value != Byte{0}; }
    static Byte element(bool value) { return static_cast<Byte>(value); }
};

// Conversions of the slow and plain kind: by the value of the fields, and to the nearest of two neighbours.
template <class Bits, int kExponentBits, int kMantissaBits>
struct Narrow {
    using Element = Bits;
    using Number = float;
    static constexpr unsigned kMantissa = (1u << kMantissaBits) - 1;
    static constexpr unsigned kExponents = (1u << kExponentBits) - 1;
    static constexpr int kBias = static_cast<int>(kExponents / 2);

    static double magnitude(unsigned bits) {  // of the infinity's bits, the power of two that would follow
        const unsigned exponent = bits >> kMantissaBits & kExponents;
        const unsigned mantissa = bits & kMantissa;
        if (exponent == 0) return std::ldexp(mantissa, 1 - kBias - kMantissaBits);
        return std::ldexp(mantissa + kMantissa + 1, static_cast<int>(exponent) - kBias - kMantissaBits);
    }
    static float number(Bits value) {
        const auto bits = static_cast<unsigned>(value);
        const bool special = (bits >> kMantissaBits & kExponents) == kExponents;
        float result = static_cast<float>(special ? 0.0 : magnitude(bits));
        if (special) {
            result = (bits & kMantissa) != 0 ? std::numeric_limits<float>::quiet_NaN()
                                             : std::numeric_limits<float>::infinity();
        }
        return std::copysign(result, (bits & 0x8000) != 0 ? -1.0f : 1.0f);
    }
    static Bits element(float value) {
        const unsigned sign = std::signbit(value) ? 0x8000 : 0;
        const unsigned infinity = kExponents << kMantissaBits;
        if (value != value) return static_cast<Bits>(sign | infinity | (kMantissa + 1) / 2);
        const double size = std::fabs(static_cast<double>(value));
        unsigned low = 0;  // the largest whose magnitude is not above
        for (unsigned step = 0x4000; step != 0; step /= 2) {
            if (low + step < infinity && magnitude(low + step) <= size) low += step;
        }
        const double below = size - magnitude(low);
        const double above = magnitude(low + 1) - size;
        if (above < below || (above == below && low % 2 == 1)) ++low;
        return static_cast<Bits>(sign | low);
    }
};
template <> struct Traits<DType::float16> : Narrow<Half, 5, 10> {};
template <> struct Traits<DType::bfloat16> : Narrow<Brain, 8, 7> {};

template <class T>
struct IsComplex : std::false_type {};
template <class T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <class T>
T random_value() {
    const std::uint64_t bits = next_random();
    if constexpr (IsComplex<T>::value) {
        using Part = typename T::value_type;
        const Part real = random_value<Part>();
        return {real, random_value<Part>()};
    } else if constexpr (std::is_floating_point_v<T>) {
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

// Returns what two numbers make, computed as C++ does without vectors.
template <class T>
T combine(Reduction reduction, T a, T b) {
    if constexpr (IsComplex<T>::value) {
        if (reduction != Reduction::prod) return a + b;
        return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
    } else {
        switch (reduction) {
            case Reduction::min: return (a < b || a != a) ? a : b;
            case Reduction::max: return (a > b || a != a) ? a : b;
            case Reduction::land: return static_cast<T>(a != T(0) && b != T(0));
            case Reduction::lor: return static_cast<T>(a != T(0) || b != T(0));
            case Reduction::lxor: return static_cast<T>((a != T(0)) != (b != T(0)));
            default: break;
        }
        if constexpr (std::is_floating_point_v<T>) {
            return reduction == Reduction::prod ? a * b : a + b;
        } else {
            const auto x = static_cast<std::uint64_t>(a);
            const auto y = static_cast<std::uint64_t>(b);
            switch (reduction) {
                case Reduction::prod: return static_cast<T>(x * y);
                case Reduction::band: return static_cast<T>(x & y);
                case Reduction::bor: return static_cast<T>(x | y);
                case Reduction::bxor: return static_cast<T>(x ^ y);
                default: return static_cast<T>(x + y);  // of bool: or
            }
        }
    }
}

template <class T>
T finish(Reduction reduction, T value) {
    if constexpr (IsComplex<T>::value) {
        using Part = typename T::value_type;
        return reduction == Reduction::mean ? T(value.real() / Part(3), value.imag() / Part(3)) : value;
    } else {
        if (reduction == Reduction::mean) return static_cast<T>(value / static_cast<T>(3));
        if (reduction >= Reduction::land) return static_cast<T>(value != T(0));
        return value;
    }
}

template <class T>
bool same(T a, T b) {
    if constexpr (IsComplex<T>::value) {
        return same(a.real(), b.real()) && same(a.imag(), b.imag());
    } else {
        return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0;
    }
}

struct Case {
    Reduction reduction;
    std::size_t sources;
    std::size_t count;
    std::size_t shift;
    bool in_place;
    std::size_t partials;
    bool partial_target;
};

template <DType kDType>
void check_reduction(const Case& given) {
    using Type = Traits<kDType>;
    using Element = typename Type::Element;
    using Number = typename Type::Number;
    const auto [reduction, sources, count, shift, in_place, partials, partial_target] = given;
    // Partial results are of the type that is computed with, which is the element's own but for 16-bit floats.
    std::vector<Array<Element>> elements;
    std::vector<Array<Number>> numbers;
    std::vector<std::uintptr_t> addresses;
    for (std::size_t s = 0; s < sources; ++s) {
        const std::size_t off = (shift + s * shift) % 64;
        if (s < sources - partials) {
            elements.emplace_back(count, off);
            addresses.push_back(elements.back().address());
        } else {
            numbers.emplace_back(count, off);
            addresses.push_back(numbers.back().address());
        }
    }
    const auto input = [&](std::size_t s, std::size_t i) {
        return s < elements.size() ? Type::number(elements[s].get(i)) : numbers[s - elements.size()].get(i);
    };
    std::deque<Number> expected;  // a vector of bool has no bool in it
    for (std::size_t i = 0; i < count; ++i) {
        Number value = input(0, i);
        for (std::size_t s = 1; s < sources; ++s) value = combine(reduction, value, input(s, i));
        expected.push_back(finish(reduction, value));
    }
    const Array<Element> apart(count, shift);
    const Array<Number> wide(count, shift);
    const Array<Element>& narrow = in_place ? elements[sources / 2] : apart;
    const std::uintptr_t target = partial_target ? wide.address() : narrow.address();
    const Request request(code(kDType), code(reduction), 3, static_cast<std::int64_t>(count), addresses, target,
                          {static_cast<std::int64_t>(partials), partial_target});
    const std::size_t middle = count / 3;  // a range that starts anywhere
    request.run(0, middle);
    request.run(middle, count - middle);
    for (std::size_t i = 0; i < count; ++i) {
        const bool right = partial_target ? same(wide.get(i), expected[i])
                                          : same(Type::number(narrow.get(i)), Type::number(Type::element(expected[i])));
        expect(right, "dtype " + std::to_string(code(kDType)) + " reduction " + std::to_string(code(reduction)) +
                          " sources " + std::to_string(sources) + " count " + std::to_string(count) + " partials " +
                          std::to_string(partials) + (partial_target ? " to a partial" : "") + " at " +
                          std::to_string(i));
    }
}

template <DType kDType>
void check_dtype() {
    using Number = typename Traits<kDType>::Number;
    constexpr bool kNarrow = kDType == DType::float16 || kDType == DType::bfloat16;
    for (std::size_t column = 0; column < allreduced::kReductions; ++column) {
        const auto reduction = static_cast<Reduction>(column);
        const bool defined = allreduced::kernels().row[code(kDType)].at[column] != nullptr;
        const bool real = std::is_floating_point_v<Number>;
        const bool pair = IsComplex<Number>::value;
        bool wanted = true;
        if (reduction == Reduction::mean) wanted = real || pair;
        if (reduction == Reduction::min || reduction == Reduction::max || reduction >= Reduction::land) wanted = !pair;
        if (reduction >= Reduction::band && reduction <= Reduction::bxor) wanted = !real && !pair;
        expect(defined == wanted, "the table at dtype " + std::to_string(code(kDType)) + " reduction " +
                                      std::to_string(column));
        if (!defined) continue;
        for (const std::size_t sources : {1, 2, 3, 4, 5, 6, 7, 8, 9, 20}) {
            if (reduction == Reduction::copy && sources != 1) continue;
            for (const std::size_t count : {0, 1, 7, 63, 64, 65, 333}) {
                check_reduction<kDType>({reduction, sources, count, 0, false, 0, false});
                check_reduction<kDType>({reduction, sources, count, 1, false, 0, false});
                check_reduction<kDType>({reduction, sources, count, 3, true, 0, false});
                if (!kNarrow || sources > 5) continue;
                for (const std::size_t partials : {std::size_t{0}, std::size_t{1}, sources / 2, sources}) {
                    check_reduction<kDType>({reduction, sources, count, 5, false, partials, true});
                    check_reduction<kDType>({reduction, sources, count, 2, false, partials, false});
                }
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
    expect_refused([&] { Request(14, 4, 1, 1, {some}, some); }, "min of complex64");
    expect_refused([&] { Request(12, 1, 1, 1, {some}, 2 * some, {-1, false}); }, "partials -1");
    expect_refused([&] { Request(12, 1, 1, 1, {some}, 2 * some, {2, false}); }, "more partials than sources");
    expect_refused([&] { Request(12, 1, 1, 1, {some}, some, {0, true}); }, "a wider target in place");
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
    check_dtype<DType::float32>();
    check_dtype<DType::float64>();
    check_dtype<DType::int8>();
    check_dtype<DType::int16>();
    check_dtype<DType::int32>();
    check_dtype<DType::int64>();
    check_dtype<DType::uint8>();
    check_dtype<DType::uint16>();
    check_dtype<DType::uint32>();
    check_dtype<DType::uint64>();
    check_dtype<DType::boolean>();
    check_dtype<DType::float16>();
    check_dtype<DType::bfloat16>();
    check_dtype<DType::complex64>();
    check_dtype<DType::complex128>();
    check_refusals();
    check_subnormals_are_kept();
    for (const int threads : {1, 2, 5}) check_pool_completes_each_job_once(threads);
    for (int round = 0; round < 10; ++round) check_pool_closes_with_jobs();
    std::printf("ok on %s\n", allreduced::instruction_set());
    return 0;
}
