// 16-bit floats: accumulated as float, rounded once when they are stored.
//
// Included by reductions.cpp only. Conversions round to nearest, ties to even; overflow gives infinity; subnormals are
// kept; a NaN stays a NaN, quiet, with its sign and upper bits. All instruction sets give the same bits. That is why
// bfloat16 never uses the conversion of AVX-512 BF16, which flushes subnormals: its conversion is a shift anyway.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>

#include "elements.h"

namespace allreduced::ALLREDUCED_ISA {
namespace {

// As many 16-bit elements as a register has floats, in half a register of memory.
template <class Conversion>
struct NarrowFloat {
    static constexpr bool kPaired = false;
    using Partial = Float32;
    using Scalar = float;
    using Vector = Float32::Vector;
    static constexpr std::size_t kItemBytes = 2;
    static constexpr std::size_t kLanes = Float32::kLanes;

    static Vector load(const unsigned char* at) { return Conversion::widen(load_vector<typename Conversion::Narrow>(at)); }
    static void store(unsigned char* at, Vector value) {
        const typename Conversion::Narrow narrow = Conversion::narrow(value);
        __builtin_memcpy(at, &narrow, sizeof narrow);
    }
    static void stream(unsigned char* at, Vector value) { stream_vector(at, Conversion::narrow(value)); }
};

#if defined(__AVX512F__)
// GCC warns of its own header for the forms of these functions that have no mask (GCC bug 105593).
constexpr __mmask16 kAllLanes = 0xffff;
#endif

// In integers of the float's size, signed because they are compared: baseline x86-64 compares no unsigned ones.
using Words = Register<std::int32_t>::type;
using Halves = Register<std::uint16_t, Float32::kLanes>::type;

inline Words to_words(Halves halves) {
#if defined(__AVX512F__)
    return (Words)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)halves);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)halves);  // one instruction; of a conversion GCC makes four
#else
    return __builtin_convertvector(halves, Words);
#endif
}

// Every word is below 2^16.
inline Halves to_halves(Words words) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);  // each half of the register on its own
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector(words, Halves);
#endif
}

struct BrainConversion {
    using Narrow = Halves;
    using Unsigned = Register<std::uint32_t>::type;

    static Float32::Vector widen(Halves halves) { return (Float32::Vector)(to_words(halves) << 16); }
    static Halves narrow(Float32::Vector value) { return to_halves((Words)(rounded(value) >> 16)); }

    // Returns words whose upper halves are the results.
    static Unsigned rounded(Float32::Vector value) {
        const Unsigned bits = (Unsigned)value;
        // Half of the last place that stays, less one if the number is even: a carry rounds it up, into infinity too.
        const Unsigned nearest = bits + 0x7fff + ((bits >> 16) & 1);
        return value != value ? bits | 0x400000 : nearest;
    }
};

#if defined(__AVX512F__)

struct HalfConversion {
    using Narrow = __m256i;
    static Float32::Vector widen(__m256i halves) { return _mm512_maskz_cvtph_ps(kAllLanes, halves); }
    static __m256i narrow(Float32::Vector value) {
        return _mm512_maskz_cvtps_ph(kAllLanes, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
};

#elif defined(__F16C__) && defined(__AVX2__)

struct HalfConversion {
    using Narrow = __m128i;
    static Float32::Vector widen(__m128i halves) { return _mm256_cvtph_ps(halves); }
    static __m128i narrow(Float32::Vector value) {
        return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
};

#elif defined(__aarch64__)

struct HalfConversion {
    using Narrow = uint16x4_t;
    static Float32::Vector widen(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }
    static uint16x4_t narrow(Float32::Vector value) { return vreinterpret_u16_f16(vcvt_f16_f32(value)); }
};

#else

// Fields of float16 moved to their places in float32: 13 bits up, and 112 more in the exponent.
struct HalfConversion {
    using Narrow = Halves;
    static constexpr std::int32_t kInfinity = 0x7f800000;
    static constexpr std::int32_t kQuiet = 0x00400000;
    static constexpr std::int32_t kBias = 112 << 23;
    static constexpr std::int32_t kSmallestNormal = 113 << 23;  // 2^-14
    static constexpr std::int32_t kOverflow = 143 << 23;        // 2^16

    static Float32::Vector widen(Halves halves) {
        const Words words = to_words(halves);
        const Words sign = (words & 0x8000) << 16;
        const Words magnitude = (words & 0x7fff) << 13;
        const Words normal = magnitude + kBias;
        // A subnormal has no leading one: read it as if it had one at 2^-14, then take that away, exactly.
        const Words one = Words{} + kSmallestNormal;
        const Words subnormal = (Words)((Float32::Vector)(magnitude + kSmallestNormal) - (Float32::Vector)one);
        const Words quiet = magnitude > (0x7c00 << 13) ? Words{} + kQuiet : Words{};
        const Words special = magnitude | kInfinity | quiet;
        Words result = magnitude < (0x0400 << 13) ? subnormal : normal;
        result = magnitude >= (0x7c00 << 13) ? special : result;
        return (Float32::Vector)(result | sign);
    }

    static Halves narrow(Float32::Vector value) {
        const Words bits = (Words)value;
        const Words sign = (bits >> 16) & 0x8000;
        const Words magnitude = bits & 0x7fffffff;
        // Half of the last place that stays, less one if the number is even: a carry rounds it up, into infinity too.
        const Words normal = (magnitude - kBias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Added to 0.5, whose last place is float16's smallest subnormal, the sum's lower bits are the rounded result.
        const Words half = Words{} + (126 << 23);
        const Words subnormal = (Words)((Float32::Vector)magnitude + (Float32::Vector)half) - half;
        const Words quiet = ((magnitude >> 13) & 0x3ff) | 0x7e00;
        Words result = magnitude < kSmallestNormal ? subnormal : normal;
        result = magnitude >= kOverflow ? Words{} + 0x7c00 : result;
        result = magnitude > kInfinity ? quiet : result;
        return to_halves(result | sign);
    }
};

#endif

using Float16 = NarrowFloat<HalfConversion>;

// Two vectors at a time, from one full register of memory: the elements in its lower and those in its upper halves of
// words. Neither needs more than a shift or a mask, and it does not matter in which order a vector has its elements, as
// long as all sources and the target of a combination have the same one.
struct BFloat16 : NarrowFloat<BrainConversion> {
    static constexpr bool kPaired = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    using Unsigned = BrainConversion::Unsigned;

    static void load_pair(const unsigned char* at, Vector& lower, Vector& upper) {
        const Unsigned words = load_vector<Unsigned>(at);
        lower = (Vector)(words << 16);
        upper = (Vector)(words & 0xffff0000);
    }
    static Unsigned narrow_pair(Vector lower, Vector upper) {
        return (BrainConversion::rounded(lower) >> 16) | (BrainConversion::rounded(upper) & 0xffff0000);
    }
    static void store_pair(unsigned char* at, Vector lower, Vector upper) {
        const Unsigned words = narrow_pair(lower, upper);
        __builtin_memcpy(at, &words, sizeof words);
    }
    static void stream_pair(unsigned char* at, Vector lower, Vector upper) {
        stream_vector(at, narrow_pair(lower, upper));
    }
};

}  // namespace
}  // namespace allreduced::ALLREDUCED_ISA
