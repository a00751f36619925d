// AdamW on the CPU in one pass over memory. The Adam worker calls these functions.
//
// A sub-group of n parameters has three fp32 arrays (master weights, first and second moment), a fourth for the accumulated gradient
// if there are several gradient accumulation steps, and a staging buffer of the weights' own type (bf16 or fp32), through which the
// gradient arrives from the GPU and the new weights return. With bf16 and no accumulation, an update moves 28 bytes per parameter:
// 12 read and 12 written for the fp32 arrays, 2 for the gradient, 2 for the weight. All arithmetic is fp32, in the order of
// torch.optim.AdamW.
//
// Results do not depend on the number of threads: sums of squares are taken per chunk and then added in the order of the chunks.
//
// Denormal numbers count as zero, as input and as result. The first moment of a parameter without gradient, such as the embedding of a
// token that is not in the batch, decays into them after some 700 steps and stays there, because 0.9 times the smallest ones rounds to
// itself. Arithmetic with them is microcoded: with 12 % of such parameters the step takes half as long again.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
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

template <typename T>
double step(const AdamWScalars c, float* p, float* m, float* v, const float* accumulated, T* staging, bool add_staging, int64_t n,
            uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float gradient[TILE];
        float* const pt = p + begin;
        float* const mt = m + begin;
        float* const vt = v + begin;
        T* const st = staging + begin;
        if (accumulated && add_staging)
            for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[begin + i] + to_float(st[i]);
        else if (accumulated)
            for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[begin + i];
        else
            for (int64_t i = 0; i < count; i++) gradient[i] = to_float(st[i]);
        const double sum = sum_of_squares(gradient, count);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const float g = gradient[i] * c.scale;
            const float first = mt[i] + c.one_minus_beta1 * (g - mt[i]);
            const float second = c.beta2 * vt[i] + c.one_minus_beta2 * g * g;
            const float denominator = std::sqrt(second) / c.root_bias_correction2 + c.epsilon;
            mt[i] = first;
            vt[i] = second;
            pt[i] = pt[i] * c.decay_factor - c.step_size * (first / denominator);
        }
        for (int64_t i = 0; i < count; i++) store(st[i], pt[i]);
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
double initialize(float* p, float* m, float* v, float* accumulated, const T* staging, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t start, int64_t count) {
        for (int64_t i = start; i < start + count; i++) p[i] = to_float(staging[i]);
        std::memset(m + start, 0, count * sizeof(float));
        std::memset(v + start, 0, count * sizeof(float));
        if (accumulated) std::memset(accumulated + start, 0, count * sizeof(float));
        return 0.0;
    });
}

}  // namespace

extern "C" {

// Copies the weights in the staging buffer to the master weights and zeroes the other arrays. Its threads are the first to touch
// the pages.
double superoffload_initialize(float* p, float* m, float* v, float* accumulated, void* staging, int is_bf16, int64_t n,
                               uint64_t* progress)
{
    return is_bf16 ? initialize(p, m, v, accumulated, static_cast<bfloat16*>(staging), n, progress)
                   : initialize(p, m, v, accumulated, static_cast<float*>(staging), n, progress);
}

// Adds the staging buffer to accumulated, or overwrites accumulated with it if first. Returns the sum of squares of accumulated.
double superoffload_accumulate(float* accumulated, void* staging, int is_bf16, int first, int64_t n, uint64_t* progress)
{
    return is_bf16 ? accumulate(accumulated, static_cast<bfloat16*>(staging), first, n, progress)
                   : accumulate(accumulated, static_cast<float*>(staging), first, n, progress);
}

// Takes one AdamW step and leaves the new weights in the staging buffer. The gradient is accumulated + staging; accumulated may be
// null, and staging is left out unless add_staging. Returns the sum of squares of the gradient before scaling.
double superoffload_step(const AdamWScalars* c, float* p, float* m, float* v, float* accumulated, void* staging, int is_bf16,
                         int add_staging, int64_t n, uint64_t* progress)
{
    return is_bf16 ? step(*c, p, m, v, accumulated, static_cast<bfloat16*>(staging), add_staging, n, progress)
                   : step(*c, p, m, v, accumulated, static_cast<float*>(staging), add_staging, n, progress);
}
}
