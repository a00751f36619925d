// AdamW on the CPU, one pass over memory: what the Adam worker computes.
//
// A sub-group of n parameters has three fp32 arrays (master, first and second moment), optionally a fourth (gradients accumulated
// over micro-steps), and an exchange array of the weights' own type (bf16 or fp32), in which a gradient comes from the GPU and the new
// weights go back. Per parameter an update moves 28 bytes (bf16, nothing accumulated): 12 read and 12 written for the fp32 arrays, 2
// for the gradient, 2 for the weight. All arithmetic is fp32 in the order of torch.optim.AdamW.
//
// Results do not depend on the number of threads: the sum of squares is added up per chunk, then over the chunks in order.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t CHUNK = 1 << 16;  // what a thread takes at a time, and reports as progress
constexpr int64_t TILE = 1 << 10;   // stays in the first-level cache between the loops over it

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

// Runs body(begin, end) -> double over all chunks and adds the results up, in order.
template <typename Body>
double over_chunks(int64_t n, uint64_t* progress, const Body& body)
{
    const int64_t chunks = (n + CHUNK - 1) / CHUNK;
    std::vector<double> partial(chunks);
#pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t begin = chunk * CHUNK;
        double sum = 0;
        for (int64_t tile = begin; tile < begin + CHUNK && tile < n; tile += TILE)
            sum += body(tile, n - tile < TILE ? n - tile : TILE);
        partial[chunk] = sum;
        __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
    }
    double total = 0;
    for (double sum : partial) total += sum;
    return total;
}

}  // namespace

extern "C" {

struct Constants {
    float scale;               // of the gradient: the clip factor
    float keep;                // 1 - learning rate * weight decay
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;           // learning rate / (1 - beta1 ** step)
    float root_correction;     // sqrt(1 - beta2 ** step)
    float epsilon;
};
}

namespace {

template <typename T>
double step(const Constants c, float* p, float* m, float* v, const float* accumulated, T* x, bool take_x, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float gradient[TILE];
        float* const pt = p + begin;
        float* const mt = m + begin;
        float* const vt = v + begin;
        T* const xt = x + begin;
        if (accumulated && take_x)
            for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[begin + i] + to_float(xt[i]);
        else if (accumulated)
            for (int64_t i = 0; i < count; i++) gradient[i] = accumulated[begin + i];
        else
            for (int64_t i = 0; i < count; i++) gradient[i] = to_float(xt[i]);
        const double sum = sum_of_squares(gradient, count);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const float g = gradient[i] * c.scale;
            const float first = mt[i] + c.one_minus_beta1 * (g - mt[i]);
            const float second = c.beta2 * vt[i] + c.one_minus_beta2 * g * g;
            const float denominator = std::sqrt(second) / c.root_correction + c.epsilon;
            mt[i] = first;
            vt[i] = second;
            pt[i] = pt[i] * c.keep - c.step_size * (first / denominator);
        }
        for (int64_t i = 0; i < count; i++) store(xt[i], pt[i]);
        return sum;
    });
}

template <typename T>
double accumulate(float* accumulated, const T* x, bool first, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t begin, int64_t count) {
        float* const at = accumulated + begin;
        const T* const xt = x + begin;
        if (first)
            for (int64_t i = 0; i < count; i++) at[i] = to_float(xt[i]);
        else
            for (int64_t i = 0; i < count; i++) at[i] += to_float(xt[i]);
        return sum_of_squares(at, count);
    });
}

template <typename T>
double begin(float* p, float* m, float* v, float* accumulated, const T* x, int64_t n, uint64_t* progress)
{
    return over_chunks(n, progress, [=](int64_t start, int64_t count) {
        for (int64_t i = start; i < start + count; i++) p[i] = to_float(x[i]);
        std::memset(m + start, 0, count * sizeof(float));
        std::memset(v + start, 0, count * sizeof(float));
        if (accumulated) std::memset(accumulated + start, 0, count * sizeof(float));
        return 0.0;
    });
}

}  // namespace

extern "C" {

// Masters from the weights in x, everything else zero. Its threads are the first to touch the pages.
double so_tui_begin(float* p, float* m, float* v, float* accumulated, void* x, int is_bf16, int64_t n, uint64_t* progress)
{
    return is_bf16 ? begin(p, m, v, accumulated, static_cast<bfloat16*>(x), n, progress)
                   : begin(p, m, v, accumulated, static_cast<float*>(x), n, progress);
}

// accumulated (first ? = : +=) x. Returns the sum of squares of accumulated.
double so_tui_accumulate(float* accumulated, void* x, int is_bf16, int first, int64_t n, uint64_t* progress)
{
    return is_bf16 ? accumulate(accumulated, static_cast<bfloat16*>(x), first, n, progress)
                   : accumulate(accumulated, static_cast<float*>(x), first, n, progress);
}

// One AdamW step with the gradient accumulated (may be null) + x (if take_x); the new weights are left in x.
// Returns the sum of squares of the gradient before scaling.
double so_tui_step(const Constants* c, float* p, float* m, float* v, float* accumulated, void* x, int is_bf16, int take_x, int64_t n,
                   uint64_t* progress)
{
    return is_bf16 ? step(*c, p, m, v, accumulated, static_cast<bfloat16*>(x), take_x, n, progress)
                   : step(*c, p, m, v, accumulated, static_cast<float*>(x), take_x, n, progress);
}
}
