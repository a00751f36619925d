// The three formats of AdamW's moments in host memory. `adam.cpp` includes this file.
//
// fp32    4 bytes each.
// bf16    2 bytes each.
// 8-bit   1 byte each: 3 bits of mantissa, and 4 bits of exponent with a sign (first moment) or 5 without one (second moment). Exponents
//         count down from that of the largest value of a block, which one more byte per block holds. Code 0 is zero. Blocks have 128
//         elements and begin with the whole parameter, so that ranks cut at most two blocks of a parameter each.
//
// The compact formats are rounded stochastically: in a step a second moment changes by a thousandth of itself, which rounding to nearest
// would lose. The random bits depend on the step, the parameter and the element's position in the whole parameter, so that a repeated
// step, any number of threads and any number of ranks round alike. To decode and encode again changes nothing.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" {

struct AdamWScalars {
    float scale;                  // factor of the gradient, from clipping
    float decay_factor;           // 1 - learning rate * weight decay
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;              // learning rate / (1 - beta1 ** step)
    float root_bias_correction2;  // sqrt(1 - beta2 ** step)
    float epsilon;
    uint32_t random;              // selects the step's random bits
};
}

namespace {

constexpr int64_t BLOCK = 128;

inline uint32_t bits_of(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline float float_of(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Consecutive elements of one parameter, and where they are.
struct Span {
    int64_t begin;    // first element, in the sub-group
    int64_t count;
    int64_t place;    // first element, in the whole parameter
    int64_t block;    // its block, in the sub-group
    uint32_t random;  // selects the parameter's random bits
};

// Moments of a span, or of a sub-group. Only the 8-bit format has exponents, one for each block.
template <typename T>
struct Moments {
    T *m, *v;
    uint8_t *m_exponents, *v_exponents;

    Moments at(const Span& span) const { return {m + span.begin, v + span.begin, m_exponents + span.block, v_exponents + span.block}; }
};

struct Stepped {
    float p, m, v;
};

// Returns what one AdamW step makes of a parameter and its moments. All arithmetic is fp32, in the order of torch.optim.AdamW. Where to fuse
// multiplication and addition is written down: compilers decide it anew for each loop, and a step out of place must have the same bits.
inline Stepped adamw(const AdamWScalars& c, float gradient, float p, float m, float v)
{
    const float g = gradient * c.scale;
    const float first = std::fma(c.one_minus_beta1, g - m, m);
    const float second = std::fma(c.beta2, v, c.one_minus_beta2 * g * g);
    const float denominator = std::sqrt(second) / c.root_bias_correction2 + c.epsilon;
    return {std::fma(-c.step_size, first / denominator, p * c.decay_factor), first, second};
}

// Returns the same for compact moments, with one division instead of two: sqrt(v) / r + epsilon is (sqrt(v) + r * epsilon) / r. Rounding a
// moment changes the result by far more than this does.
inline Stepped adamw_of_compact(const AdamWScalars& c, float gradient, float p, float m, float v)
{
    const float g = gradient * c.scale;
    const float first = std::fma(c.one_minus_beta1, g - m, m);
    const float second = std::fma(c.beta2, v, c.one_minus_beta2 * g * g);
    const float denominator = std::sqrt(second) + c.root_bias_correction2 * c.epsilon;
    return {std::fma(-(c.step_size * c.root_bias_correction2), first / denominator, p * c.decay_factor), first, second};
}

// Returns the hash lowbias32 of C. Wellons' hash-prospector.
inline uint32_t hashed(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Selects the bits that round a span: at random, or to nearest.
struct Rounding {
    bool at_random;
    uint32_t place, key;

    // Returns 16 bits for each of an element's moments.
    uint32_t bits(uint32_t element) const { return at_random ? hashed((place + element) * 0x9E3779B1u + key) : 0x80008000u; }

    Rounding from(int64_t element) const { return {at_random, place + static_cast<uint32_t>(element), key}; }
};

// All keys select parts of one sequence, so they are hashed: a step would otherwise repeat the bits of a step before, some places further.
inline Rounding at_random(const Span& span, uint32_t step)
{
    return {true, static_cast<uint32_t>(span.place), hashed(span.random ^ step)};
}

constexpr Rounding TO_NEAREST{false, 0, 0};

// Each format steps, decodes and encodes a span. All pointers begin with the span; a step may write to the arrays that it reads.

struct Fp32 {
    using Type = float;

    static void step(const AdamWScalars& c, const Span& span, const float* gradient, const float* p, const Moments<float>& from,
                     float* new_p, const Moments<float>& to)
    {
#pragma omp simd
        for (int64_t i = 0; i < span.count; i++) {
            const Stepped stepped = adamw(c, gradient[i], p[i], from.m[i], from.v[i]);
            new_p[i] = stepped.p;
            to.m[i] = stepped.m;
            to.v[i] = stepped.v;
        }
    }

    static void decode(const Span& span, const Moments<float>& from, float* m, float* v)
    {
        std::memcpy(m, from.m, span.count * sizeof(float));
        std::memcpy(v, from.v, span.count * sizeof(float));
    }

    static void encode(const Span& span, const float* m, const float* v, const Moments<float>& to)
    {
        std::memcpy(to.m, m, span.count * sizeof(float));
        std::memcpy(to.v, v, span.count * sizeof(float));
    }
};

struct Bf16 {
    using Type = uint16_t;

    static void step(const AdamWScalars& c, const Span& span, const float* gradient, const float* p, const Moments<uint16_t>& from,
                     float* new_p, const Moments<uint16_t>& to)
    {
        const Rounding rounding = at_random(span, c.random);
#pragma omp simd
        for (int64_t i = 0; i < span.count; i++) {
            const Stepped stepped = adamw_of_compact(c, gradient[i], p[i], decoded(from.m[i]), decoded(from.v[i]));
            const uint32_t random = rounding.bits(static_cast<uint32_t>(i));
            new_p[i] = stepped.p;
            to.m[i] = encoded(stepped.m, random & 0xFFFF);
            to.v[i] = encoded(stepped.v, random >> 16);
        }
    }

    static void decode(const Span& span, const Moments<uint16_t>& from, float* m, float* v)
    {
        for (int64_t i = 0; i < span.count; i++) m[i] = decoded(from.m[i]);
        for (int64_t i = 0; i < span.count; i++) v[i] = decoded(from.v[i]);
    }

    static void encode(const Span& span, const float* m, const float* v, const Moments<uint16_t>& to)
    {
        for (int64_t i = 0; i < span.count; i++) to.m[i] = encoded(m[i], 0x8000);
        for (int64_t i = 0; i < span.count; i++) to.v[i] = encoded(v[i], 0x8000);
    }

private:
    static float decoded(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
    static uint16_t encoded(float value, uint32_t random) { return static_cast<uint16_t>((bits_of(value) + random) >> 16); }
};

struct Int8 {
    using Type = uint8_t;

    static void step(const AdamWScalars& c, const Span& span, const float* gradient, const float* p, const Moments<uint8_t>& from,
                     float* new_p, const Moments<uint8_t>& to)
    {
        const Rounding rounding = at_random(span, c.random);
        over_blocks(span, [&](int64_t begin, auto count, int64_t block) {
            step_block(c, rounding.from(begin), gradient + begin, p + begin, part(from, begin, block), new_p + begin,
                       part(to, begin, block), count);
        });
    }

    static void decode(const Span& span, const Moments<uint8_t>& from, float* m, float* v)
    {
        over_blocks(span, [&](int64_t begin, auto count, int64_t block) {
            const uint32_t m_base = base(from.m_exponents[block], M_OCTAVES), v_base = base(from.v_exponents[block], V_OCTAVES);
            for (int64_t i = begin; i < begin + count; i++) m[i] = decoded_m(from.m[i], m_base);
            for (int64_t i = begin; i < begin + count; i++) v[i] = decoded_v(from.v[i], v_base);
        });
    }

    static void encode(const Span& span, const float* m, const float* v, const Moments<uint8_t>& to)
    {
        over_blocks(span, [&](int64_t begin, auto count, int64_t block) {
            Stage stage;
            for (int64_t i = 0; i < count; i++) stage.put(i, m[begin + i], std::fabs(v[begin + i]));  // -0 would be the largest
            for (int64_t i = 0; i < count; i++) {
                stage.m_largest = larger(stage.m_largest, stage.m[i] & MAGNITUDE);
                stage.v_largest = larger(stage.v_largest, stage.v[i]);
            }
            encode_block(stage, TO_NEAREST, part(to, begin, block), count);
        });
    }

private:
    static constexpr uint32_t MAGNITUDE = 0x7FFFFFFF;
    static constexpr uint32_t DROPPED = 20;  // bits of a float's mantissa that a code lacks
    static constexpr uint32_t M_OCTAVES = 15, V_OCTAVES = 31;  // from the largest exponent of a block down to the smallest code's

    // The bits of a block's new moments before they are encoded.
    struct Stage {
        alignas(64) uint32_t m[BLOCK];
        alignas(64) uint32_t v[BLOCK];
        uint32_t m_largest = 0, v_largest = 0;

        void put(int64_t i, float first, float second)
        {
            m[i] = bits_of(first);
            v[i] = bits_of(second);
        }
    };

    static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

    // Returns the exponent of a block's largest value, or the next one if the value is larger than the largest mantissa of a code.
    static uint32_t largest_exponent(uint32_t bits) { return (bits + (1u << DROPPED) - 1) >> 23; }

    // Returns the bits of the float that code 0 would stand for, if it were not zero.
    static uint32_t base(uint32_t largest_exponent, uint32_t octaves)
    {
        return (largest_exponent > octaves ? largest_exponent - octaves : 1) << 23;
    }

    static float decoded_m(uint32_t code, uint32_t base)
    {
        return float_of((code & 0x7F ? base + ((code & 0x7F) << DROPPED) : 0) | (code & 0x80) << 24);
    }

    static float decoded_v(uint32_t code, uint32_t base) { return float_of(code ? base + (code << DROPPED) : 0); }

    static uint32_t encoded(uint32_t bits, uint32_t random, uint32_t base, uint32_t largest)
    {
        const uint32_t code = (larger(bits + (random << (DROPPED - 16)), base) - base) >> DROPPED;
        return code < largest ? code : largest;
    }

    template <typename Count>
    static void step_block(const AdamWScalars& c, const Rounding& rounding, const float* gradient, const float* p,
                           const Moments<uint8_t>& from, float* new_p, const Moments<uint8_t>& to, Count count)
    {
        const uint32_t m_base = base(*from.m_exponents, M_OCTAVES), v_base = base(*from.v_exponents, V_OCTAVES);
        Stage stage;
        uint32_t m_largest = 0, v_largest = 0;
#pragma omp simd reduction(max : m_largest, v_largest)
        for (int64_t i = 0; i < count; i++) {
            const Stepped stepped =
                adamw_of_compact(c, gradient[i], p[i], decoded_m(from.m[i], m_base), decoded_v(from.v[i], v_base));
            new_p[i] = stepped.p;
            stage.put(i, stepped.m, stepped.v);
            m_largest = larger(m_largest, stage.m[i] & MAGNITUDE);
            v_largest = larger(v_largest, stage.v[i]);
        }
        stage.m_largest = m_largest;
        stage.v_largest = v_largest;
        encode_block(stage, rounding, to, count);
    }

    template <typename Count>
    static void encode_block(const Stage& stage, const Rounding& rounding, const Moments<uint8_t>& to, Count count)
    {
        const uint32_t m_exponent = largest_exponent(stage.m_largest), v_exponent = largest_exponent(stage.v_largest);
        const uint32_t m_base = base(m_exponent, M_OCTAVES), v_base = base(v_exponent, V_OCTAVES);
        *to.m_exponents = static_cast<uint8_t>(m_exponent);
        *to.v_exponents = static_cast<uint8_t>(v_exponent);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const uint32_t random = rounding.bits(static_cast<uint32_t>(i));
            const uint32_t m = encoded(stage.m[i] & MAGNITUDE, random & 0xFFFF, m_base, 0x7F);
            const uint32_t v = encoded(stage.v[i], random >> 16, v_base, 0xFF);
            to.m[i] = static_cast<uint8_t>(m | (stage.m[i] >> 24 & 0x80));
            // Never 0 unless it is: the next step would divide by its root.
            to.v[i] = static_cast<uint8_t>(stage.v[i] && !v ? 1 : v);
        }
    }

#if defined(__AVX512F__)
    // The same for a whole block, since compilers make poor code of loops over bytes and floats: a third faster than the loops above.
    static void step_block(const AdamWScalars& c, const Rounding& rounding, const float* gradient, const float* p,
                           const Moments<uint8_t>& from, float* new_p, const Moments<uint8_t>& to,
                           std::integral_constant<int64_t, BLOCK>)
    {
        constexpr int VECTORS = BLOCK / 16;
        const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE), sign = _mm512_set1_epi32(0x80), one = _mm512_set1_epi32(1);
        const __m512i m_codes = _mm512_set1_epi32(0x7F), v_codes = _mm512_set1_epi32(0xFF);
        const __m512i m_base = _mm512_set1_epi32(base(*from.m_exponents, M_OCTAVES));
        const __m512i v_base = _mm512_set1_epi32(base(*from.v_exponents, V_OCTAVES));
        const __m512 epsilon = _mm512_set1_ps(c.root_bias_correction2 * c.epsilon);
        const __m512 step_size = _mm512_set1_ps(c.step_size * c.root_bias_correction2);
        __m512i new_m[VECTORS], new_v[VECTORS], m_largest = _mm512_setzero_si512(), v_largest = m_largest;
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            const __m512i m_code = load_codes(from.m + 16 * j), v_code = load_codes(from.v + 16 * j);
            const __m512i m_sign = _mm512_slli_epi32(_mm512_and_si512(m_code, sign), 24);
            const __m512 m = _mm512_castsi512_ps(_mm512_or_si512(decoded(_mm512_and_si512(m_code, m_codes), m_base), m_sign));
            const __m512 v = _mm512_castsi512_ps(decoded(v_code, v_base));
            const __m512 g = _mm512_mul_ps(_mm512_loadu_ps(gradient + 16 * j), _mm512_set1_ps(c.scale));
            const __m512 first = _mm512_fmadd_ps(_mm512_set1_ps(c.one_minus_beta1), _mm512_sub_ps(g, m), m);
            const __m512 squared = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(c.one_minus_beta2), g), g);
            const __m512 second = _mm512_fmadd_ps(_mm512_set1_ps(c.beta2), v, squared);
            const __m512 quotient = _mm512_div_ps(first, _mm512_add_ps(_mm512_sqrt_ps(second), epsilon));
            const __m512 decayed = _mm512_mul_ps(_mm512_loadu_ps(p + 16 * j), _mm512_set1_ps(c.decay_factor));
            _mm512_storeu_ps(new_p + 16 * j, _mm512_fnmadd_ps(step_size, quotient, decayed));
            new_m[j] = _mm512_castps_si512(first);
            new_v[j] = _mm512_castps_si512(second);
            m_largest = _mm512_max_epu32(m_largest, _mm512_and_si512(new_m[j], magnitude));
            v_largest = _mm512_max_epu32(v_largest, new_v[j]);
        }
        const uint32_t m_exponent = largest_exponent(_mm512_reduce_max_epu32(m_largest));
        const uint32_t v_exponent = largest_exponent(_mm512_reduce_max_epu32(v_largest));
        const __m512i new_m_base = _mm512_set1_epi32(base(m_exponent, M_OCTAVES));
        const __m512i new_v_base = _mm512_set1_epi32(base(v_exponent, V_OCTAVES));
        *to.m_exponents = static_cast<uint8_t>(m_exponent);
        *to.v_exponents = static_cast<uint8_t>(v_exponent);
        alignas(64) uint32_t random[BLOCK];
#pragma omp simd
        for (uint32_t i = 0; i < BLOCK; i++) random[i] = rounding.bits(i);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            const __m512i bits = _mm512_load_si512(random + 16 * j);
            const __m512i m_bits = _mm512_and_si512(bits, _mm512_set1_epi32(0xFFFF)), v_bits = _mm512_srli_epi32(bits, 16);
            const __m512i m = encoded(_mm512_and_si512(new_m[j], magnitude), m_bits, new_m_base, m_codes);
            const __m512i v = encoded(new_v[j], v_bits, new_v_base, v_codes);
            store_codes(to.m + 16 * j, _mm512_or_si512(m, _mm512_and_si512(_mm512_srli_epi32(new_m[j], 24), sign)));
            store_codes(to.v + 16 * j, _mm512_mask_max_epu32(v, _mm512_test_epi32_mask(new_v[j], new_v[j]), v, one));
        }
    }

    static __m512i load_codes(const uint8_t* codes)
    {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    }

    static void store_codes(uint8_t* target, __m512i codes)
    {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(codes));
    }

    static __m512i decoded(__m512i codes, __m512i base)
    {
        return _mm512_maskz_add_epi32(_mm512_test_epi32_mask(codes, codes), _mm512_slli_epi32(codes, DROPPED), base);
    }

    static __m512i encoded(__m512i bits, __m512i random, __m512i base, __m512i largest)
    {
        const __m512i rounded = _mm512_max_epu32(_mm512_add_epi32(bits, _mm512_slli_epi32(random, DROPPED - 16)), base);
        return _mm512_min_epu32(_mm512_srli_epi32(_mm512_sub_epi32(rounded, base), DROPPED), largest);
    }
#endif

    // Returns the part of a span's moments that begins at an element, which is in the given block of the span.
    static Moments<uint8_t> part(const Moments<uint8_t>& moments, int64_t begin, int64_t block)
    {
        return {moments.m + begin, moments.v + begin, moments.m_exponents + block, moments.v_exponents + block};
    }

    // Runs body(begin, count, block) for every block of a span. The count of a whole block is a constant.
    template <typename Body>
    static void over_blocks(const Span& span, const Body& body)
    {
        int64_t block = 0;
        for (int64_t begin = 0; begin < span.count; block++) {
            const int64_t left = BLOCK - (span.place + begin) % BLOCK, count = span.count - begin < left ? span.count - begin : left;
            if (count == BLOCK)
                body(begin, std::integral_constant<int64_t, BLOCK>(), block);
            else
                body(begin, count, block);
            begin += count;
        }
    }
};

}  // namespace
