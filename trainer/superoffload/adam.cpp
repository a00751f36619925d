// AdamW on the CPU in one pass over memory. The Adam worker calls these functions.
//
// A sub-group of n parameters has three fp32 arrays (master weights, first and second moment), a fourth for the accumulated gradient
// if there are several gradient accumulation steps, and a staging buffer of the weights' own type (bf16 or fp32), through which the
// gradient arrives from the GPU and the new weights return. With bf16 and no accumulation, an update moves 28 bytes per parameter:
// 12 read and 12 written for the fp32 arrays, 2 for the gradient, 2 for the weight. All arithmetic is fp32, in the order of
// torch.optim.AdamW.
//
// A speculative step writes to a second set of arrays and to another buffer, and changes nothing that it reads. Its stores bypass the
// caches: a processor otherwise reads every line from memory before it is overwritten, 14 bytes more per parameter.
//
// Results do not depend on the number of threads: sums of squares are taken per chunk and then added in the order of the chunks.
//
// Denormal numbers count as zero, as input and as result. The first moment of a parameter without gradient, such as the embedding of a
// token that is not in the batch, decays into them after some 700 steps and stays there, because 0.9 times the smallest ones rounds to
// itself. Arithmetic with them is microcoded: with 12 % of such parameters the step takes half as long again.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// While it lives, this thread takes denormal numbers for zero (x86: flush to zero and denormals are zero; Arm: FPCR.FZ).
class WithoutDenormals {
public:
#if defined(__x86_64__)
    WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before_); }

private:
    unsigned int before_;
#elif defined(__aarch64__)
    WithoutDenormals()
    {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
    }
    ~WithoutDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

private:
    uint64_t before_;
#endif
};

constexpr int64_t CHUNK = 1 << 16;  // elements that a thread takes at a time and counts as progress
constexpr int64_t TILE = 1 << 10;   // elements that stay in the L1 cache between the loops over them

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(bfloat16 value)
{
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

inline float to_float(float value) { return value; }

inline void store(bfloat16& target, float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    target.bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

inline void store(float& target, float value) { target = value; }

inline double sum_of_squares(const float* values, int64_t count)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += static_cast<double>(values[i]) * values[i];
    return sum;
}

// Copies count values to a target that is aligned to 64 bytes. On x86 they bypass the caches, and finish_streaming must follow; Arm cores
// themselves detect that whole lines are overwritten.
template <typename T>
inline void stream(T* target, const T* source, int64_t count)
{
    int64_t done = 0;
#if defined(__AVX512F__)
    constexpr int64_t WIDTH = 64 / sizeof(T);
    for (; done + WIDTH <= count; done += WIDTH)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_load_si512(source + done));
#elif defined(__x86_64__)
    constexpr int64_t WIDTH = 16 / sizeof(T);
    for (; done + WIDTH <= count; done += WIDTH)
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + done), _mm_load_si128(reinterpret_cast<const __m128i*>(source + done)));
#endif
    std::memcpy(target + done, source + done, (count - done) * sizeof(T));
}

// Makes what this thread streamed visible to other threads, processes and devices.
inline void finish_streaming()
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Runs body(begin, count) -> double over all tiles and returns the sum of the results, added in the order of the chunks.
template <typename Body>
double over_chunks(int64_t n, uint64_t* progress, const Body& body)
{
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    std::vector<double> partial(chunks);
#pragma omp parallel
    {
        const WithoutDenormals guard;
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t begin = chunk * CHUNK;
            double sum = 0;
            for (int64_t tile = begin; tile < begin + CHUNK && tile < n; tile += TILE)
                sum += body(tile, n - tile < TILE ? n - tile : TILE);
            partial[chunk] = sum;
            __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
        }
        finish_streaming();
    }
    double total = 0;
    for (double sum : partial) total += sum;
    return total;
}

}  // namespace

extern "C" {

struct AdamWScalars {
    float scale;                  // factor of the gradient, from clipping
    float decay_factor;           // 1 - learning rate * weight decay
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;              // learning rate / (1 - beta1 ** step)
    float root_bias_correction2;  // sqrt(1 - beta2 ** step)
    float epsilon;
};
}

namespace {

// One set of a sub-group's fp32 arrays.
struct States {
    float* p;
    float* m;
    float* v;

    States from(int64_t begin) const { return {p + begin, m + begin, v + begin}; }
};

// Where a speculative step puts one tile before it is streamed to memory.
template <typename T>
struct alignas(64) NewTile {
    float p[TILE];
    float m[TILE];
    float v[TILE];
    T weights[TILE];
};

template <typename T>
inline void load_gradient(float* gradient, const float* accumulated, const T* staging, bool add_staging, int64_t count)
{
    if (accumulated && add_staging)
        for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[i] + to_float(staging[i]);
    else if (accumulated)
        for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[i];
    else
        for (int64_t i = 0; i < count; i++) gradient[i] = to_float(staging[i]);
}

// Steps count parameters from one set of arrays into another, which may be the same.
template <typename T>
inline void adamw(const AdamWScalars& c, const float* gradient, const States& from, const States& to, T* weights, int64_t count)
{
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float g = gradient[i] * c.scale;
        const float first = from.m[i] + c.one_minus_beta1 * (g - from.m[i]);
        const float second = c.beta2 * from.v[i] + c.one_minus_beta2 * g * g;
        const float denominator = std::sqrt(second) / c.root_bias_correction2 + c.epsilon;
        to.m[i] = first;
        to.v[i] = second;
        to.p[i] = from.p[i] * c.decay_factor - c.step_size * (first / denominator);
    }
    for (int64_t i = 0; i < count; i++) store(weights[i], to.p[i]);
}

template <typename T>
double step(const AdamWScalars c, const States states, const float* accumulated, T* staging, bool add_staging, int64_t n,
            uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float gradient[TILE];
        load_gradient(gradient, accumulated ? accumulated + begin : nullptr, staging + begin, add_staging, count);
        const double sum = sum_of_squares(gradient, count);
        adamw(c, gradient, states.from(begin), states.from(begin), staging + begin, count);
        return sum;
    });
}

template <typename T>
double speculate(const AdamWScalars c, const States old_states, const States new_states, const float* accumulated, const T* staging,
                 T* new_weights, bool add_staging, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float gradient[TILE];
        NewTile<T> tile;
        load_gradient(gradient, accumulated ? accumulated + begin : nullptr, staging + begin, add_staging, count);
        const double sum = sum_of_squares(gradient, count);
        adamw(c, gradient, old_states.from(begin), States{tile.p, tile.m, tile.v}, tile.weights, count);
        stream(new_states.p + begin, tile.p, count);
        stream(new_states.m + begin, tile.m, count);
        stream(new_states.v + begin, tile.v, count);
        stream(new_weights + begin, tile.weights, count);
        return sum;
    });
}

template <typename T>
double accumulate(float* accumulated, const T* staging, bool first, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float* const at = accumulated + begin;
        const T* const st = staging + begin;
        if (first)
            for (int64_t i = 0; i < count; i++) at[i] = to_float(st[i]);
        else
            for (int64_t i = 0; i < count; i++) at[i] += to_float(st[i]);
        return sum_of_squares(at, count);
    });
}

template <typename T>
double initialize(const States states, const States second, float* accumulated, const T* staging, T* new_weights, int64_t n,
                  uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        for (int64_t i = begin; i < begin + count; i++) states.p[i] = to_float(staging[i]);
        for (float* array : {states.m, states.v, second.p, second.m, second.v, accumulated})
            if (array) std::memset(array + begin, 0, count * sizeof(float));
        if (new_weights) std::memset(new_weights + begin, 0, count * sizeof(T));
        return 0.0;
    });
}

template <typename T>
double restore(const float* p, T* staging, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        for (int64_t i = begin; i < begin + count; i++) store(staging[i], p[i]);
        return 0.0;
    });
}

}  // namespace

extern "C" {

// Copies the weights in the staging buffer to the master weights and zeroes the other arrays; those of second, new_weights and
// accumulated may be null. Its threads are the first to touch the pages.
double superoffload_initialize(const States* states, const States* second, float* accumulated, void* staging, void* new_weights,
                               int is_bf16, int64_t n, uint64_t* progress)
{
    return is_bf16 ? initialize(*states, *second, accumulated, static_cast<bfloat16*>(staging), static_cast<bfloat16*>(new_weights), n,
                                progress)
                   : initialize(*states, *second, accumulated, static_cast<float*>(staging), static_cast<float*>(new_weights), n, progress);
}

// Adds the staging buffer to accumulated, or overwrites accumulated with it if first. Returns the sum of squares of accumulated.
double superoffload_accumulate(float* accumulated, void* staging, int first, int is_bf16, int64_t n, uint64_t* progress)
{
    return is_bf16 ? accumulate(accumulated, static_cast<bfloat16*>(staging), first, n, progress)
                   : accumulate(accumulated, static_cast<float*>(staging), first, n, progress);
}

// Takes one AdamW step and leaves the new weights in the staging buffer. The gradient is accumulated + staging; accumulated may be
// null, and staging is left out unless add_staging. Returns the sum of squares of the gradient before scaling.
double superoffload_step(const AdamWScalars* c, const States* states, float* accumulated, void* staging, int add_staging, int is_bf16,
                         int64_t n, uint64_t* progress)
{
    return is_bf16 ? step(*c, *states, accumulated, static_cast<bfloat16*>(staging), add_staging, n, progress)
                   : step(*c, *states, accumulated, static_cast<float*>(staging), add_staging, n, progress);
}

// The same from old_states to new_states and new_weights, with the same results bit for bit.
double superoffload_speculate(const AdamWScalars* c, const States* old_states, const States* new_states, float* accumulated,
                              void* staging, void* new_weights, int add_staging, int is_bf16, int64_t n, uint64_t* progress)
{
    return is_bf16 ? speculate(*c, *old_states, *new_states, accumulated, static_cast<bfloat16*>(staging),
                               static_cast<bfloat16*>(new_weights), add_staging, n, progress)
                   : speculate(*c, *old_states, *new_states, accumulated, static_cast<float*>(staging), static_cast<float*>(new_weights),
                               add_staging, n, progress);
}

// Leaves the weights of these states in the staging buffer.
double superoffload_restore(const States* states, void* staging, int is_bf16, int64_t n, uint64_t* progress)
{
    return is_bf16 ? restore(states->p, static_cast<bfloat16*>(staging), n, progress)
                   : restore(states->p, static_cast<float*>(staging), n, progress);
}
}
