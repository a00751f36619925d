// AdamW on the CPU in one pass over memory. The Adam worker calls these functions.
//
// A sub-group of n parameters has fp32 master weights, two moments in one of three formats (moments.h), an fp32 array for the accumulated
// gradient if there are several gradient accumulation steps, and a staging buffer of the weights' own type (bf16 or fp32), through which
// the gradient arrives from the GPU and the new weights return. With bf16 weights and no accumulation an update moves 28 bytes per
// parameter with fp32 moments (12 read and 12 written for the states, 2 for the gradient, 2 for the weight), 20 with bf16 and 16 with
// 8-bit moments.
//
// A speculative step writes to a second set of arrays and to another buffer, and changes nothing that it reads. Its stores bypass the
// caches: a processor otherwise reads every line from memory before it is overwritten, 14 bytes more per parameter.
//
// Results do not depend on the number of threads: sums of squares are taken per chunk and then added in the order of the chunks.
//
// Denormal numbers count as zero, as input and as result. The first moment of a parameter without gradient, such as the embedding of a
// token that is not in the batch, decays into them after some 700 steps and stays there, because 0.9 times the smallest ones rounds to
// itself. Arithmetic with them is microcoded: with 12 % of such parameters the step takes half as long again.

#include <initializer_list>
#include <vector>

#include "moments.h"

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

static_assert(CHUNK % TILE == 0 && TILE % BLOCK == 0);  // no thread shares a block with another

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(bfloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

inline float to_float(float value) { return value; }

inline void store(bfloat16& target, float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
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

// Copies count values from the L1 cache to memory. On x86 whole lines bypass the caches, and finish_streaming must follow; Arm cores
// themselves detect that whole lines are overwritten.
template <typename T>
inline void stream(T* target, const T* source, int64_t count)
{
    int64_t done = 0;
#if defined(__x86_64__)
#if defined(__AVX512F__)
    constexpr int64_t LINE = 64;
#else
    constexpr int64_t LINE = 16;
#endif
    constexpr int64_t WIDTH = LINE / sizeof(T);
    const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % LINE / sizeof(T));
    for (; done < head && done < count; done++) target[done] = source[done];
    for (; done + WIDTH <= count; done += WIDTH)
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
#else
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + done), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done)));
#endif
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

}  // namespace

extern "C" {

// One set of a sub-group's states; all null for a set that does not exist. The exponents exist for 8-bit moments only.
struct States {
    float* p;
    void *m, *v;
    uint8_t *m_exponents, *v_exponents;
};

// This rank's shard of one parameter. The segments of a sub-group follow each other without gaps.
struct Segment {
    int64_t count;
    int64_t place;   // its first element, in the whole parameter
    int64_t random;  // selects the parameter's random bits
};

struct SubGroup {
    const Segment* segments;
    int64_t segment_count;
    int32_t has_bf16_weights;
    int32_t format;  // of the moments: 0 fp32, 1 bf16, 2 8-bit
};
}

namespace {

// Returns the chunks of a sub-group in order. They end where a chunk of the whole parameter does.
std::vector<Span> chunks(const SubGroup& group)
{
    std::vector<Span> result;
    int64_t begin = 0, block = 0;
    for (const Segment* segment = group.segments; segment < group.segments + group.segment_count; segment++) {
        const int64_t end = segment->place + segment->count, first_block = segment->place / BLOCK;
        for (int64_t place = segment->place; place < end;) {
            const int64_t whole = (place / CHUNK + 1) * CHUNK, stop = whole < end ? whole : end;
            result.push_back({begin, stop - place, place, block + place / BLOCK - first_block, static_cast<uint32_t>(segment->random)});
            begin += stop - place;
            place = stop;
        }
        if (segment->count) block += (end - 1) / BLOCK - first_block + 1;
    }
    return result;
}

// Runs body(tile) for the tiles of a chunk, which end where a tile of the whole parameter does.
template <typename Body>
void over_tiles(const Span& chunk, const Body& body)
{
    for (int64_t at = 0; at < chunk.count;) {
        const int64_t place = chunk.place + at, whole = TILE - place % TILE, count = chunk.count - at < whole ? chunk.count - at : whole;
        body(Span{chunk.begin + at, count, place, chunk.block + place / BLOCK - chunk.place / BLOCK, chunk.random});
        at += count;
    }
}

// Runs body(tile) -> double over all tiles of a sub-group and returns the sum of the results, added in the order of the chunks.
template <typename Body>
double sum_over(const SubGroup& group, uint64_t* progress, const Body& body)
{
    const std::vector<Span> all = chunks(group);
    std::vector<double> partial(all.size());
#pragma omp parallel
    {
        const WithoutDenormals guard;
#pragma omp for schedule(static)
        for (size_t i = 0; i < all.size(); i++) {
            double sum = 0;
            over_tiles(all[i], [&](const Span& tile) { sum += body(tile); });
            partial[i] = sum;
            __atomic_fetch_add(progress, 1, __ATOMIC_RELAXED);
        }
        finish_streaming();
    }
    double total = 0;
    for (double sum : partial) total += sum;
    return total;
}

template <typename Format>
Moments<typename Format::Type> moments(const States& states)
{
    using T = typename Format::Type;
    return {static_cast<T*>(states.m), static_cast<T*>(states.v), states.m_exponents, states.v_exponents};
}

// Where a speculative step puts one tile before it is streamed to memory.
template <typename T, typename Moment>
struct alignas(64) NewTile {
    float p[TILE];
    Moment m[TILE];
    Moment v[TILE];
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

template <typename Format, typename T>
double step(const SubGroup& group, const AdamWScalars c, const States states, const float* accumulated, T* staging, bool add_staging,
            uint64_t* progress)
{
    const auto all = moments<Format>(states);
    return sum_over(group, progress, [=](const Span& tile) {
        float gradient[TILE];
        float* const p = states.p + tile.begin;
        T* const weights = staging + tile.begin;
        load_gradient(gradient, accumulated ? accumulated + tile.begin : nullptr, weights, add_staging, tile.count);
        const double sum = sum_of_squares(gradient, tile.count);
        Format::step(c, tile, gradient, p, all.at(tile), p, all.at(tile));
        for (int64_t i = 0; i < tile.count; i++) store(weights[i], p[i]);
        return sum;
    });
}

template <typename Format, typename T>
double speculate(const SubGroup& group, const AdamWScalars c, const States old_states, const States new_states, const float* accumulated,
                 const T* staging, T* new_weights, bool add_staging, uint64_t* progress)
{
    const auto from = moments<Format>(old_states), to = moments<Format>(new_states);
    return sum_over(group, progress, [=](const Span& tile) {
        float gradient[TILE];
        NewTile<T, typename Format::Type> made;
        load_gradient(gradient, accumulated ? accumulated + tile.begin : nullptr, staging + tile.begin, add_staging, tile.count);
        const double sum = sum_of_squares(gradient, tile.count);
        auto target = to.at(tile);
        Format::step(c, tile, gradient, old_states.p + tile.begin, from.at(tile), made.p,
                     {made.m, made.v, target.m_exponents, target.v_exponents});
        for (int64_t i = 0; i < tile.count; i++) store(made.weights[i], made.p[i]);
        stream(new_states.p + tile.begin, made.p, tile.count);
        stream(target.m, made.m, tile.count);
        stream(target.v, made.v, tile.count);
        stream(new_weights + tile.begin, made.weights, tile.count);
        return sum;
    });
}

template <typename T>
double accumulate(const SubGroup& group, float* accumulated, const T* staging, bool first, uint64_t* progress)
{
    return sum_over(group, progress, [=](const Span& tile) {
        float* const at = accumulated + tile.begin;
        const T* const st = staging + tile.begin;
        if (first)
            for (int64_t i = 0; i < tile.count; i++) at[i] = to_float(st[i]);
        else
            for (int64_t i = 0; i < tile.count; i++) at[i] += to_float(st[i]);
        return sum_of_squares(at, tile.count);
    });
}

template <typename Format>
void zero(const States& states, const Span& tile)
{
    if (!states.m) return;
    const auto target = moments<Format>(states).at(tile);
    std::memset(target.m, 0, tile.count * sizeof(*target.m));
    std::memset(target.v, 0, tile.count * sizeof(*target.v));
    if (!states.m_exponents) return;
    const int64_t blocks = (tile.place + tile.count - 1) / BLOCK - tile.place / BLOCK + 1;
    std::memset(target.m_exponents, 0, blocks);
    std::memset(target.v_exponents, 0, blocks);
}

template <typename Format, typename T>
double initialize(const SubGroup& group, const States states, const States second, float* accumulated, const T* staging, T* new_weights,
                  uint64_t* progress)
{
    return sum_over(group, progress, [=](const Span& tile) {
        const int64_t begin = tile.begin;
        for (int64_t i = begin; i < begin + tile.count; i++) states.p[i] = to_float(staging[i]);
        for (float* array : {second.p, accumulated})
            if (array) std::memset(array + begin, 0, tile.count * sizeof(float));
        zero<Format>(states, tile);
        zero<Format>(second, tile);
        if (new_weights) std::memset(new_weights + begin, 0, tile.count * sizeof(T));
        return 0.0;
    });
}

template <typename T>
double restore(const SubGroup& group, const float* p, T* staging, uint64_t* progress)
{
    return sum_over(group, progress, [=](const Span& tile) {
        for (int64_t i = tile.begin; i < tile.begin + tile.count; i++) store(staging[i], p[i]);
        return 0.0;
    });
}

// Calls function(format, pointer to the weights' type) with the types of a sub-group.
template <typename Function>
auto with_types(const SubGroup& group, const Function& function)
{
    const auto with_format = [&](auto format) {
        return group.has_bf16_weights ? function(format, static_cast<bfloat16*>(nullptr)) : function(format, static_cast<float*>(nullptr));
    };
    return group.format == 0 ? with_format(Fp32()) : group.format == 1 ? with_format(Bf16()) : with_format(Int8());
}

}  // namespace

extern "C" {

// Copies the weights in the staging buffer to the master weights and zeroes the other arrays; those of second, new_weights and
// accumulated may be null. Its threads are the first to touch the pages.
double superoffload_initialize(const States* states, const States* second, float* accumulated, void* staging, void* new_weights,
                               const SubGroup* group, uint64_t* progress)
{
    return with_types(*group, [&](auto format, auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return initialize<decltype(format)>(*group, *states, *second, accumulated, static_cast<const T*>(staging),
                                            static_cast<T*>(new_weights), progress);
    });
}

// Adds the staging buffer to accumulated, or overwrites accumulated with it if first. Returns the sum of squares of accumulated.
double superoffload_accumulate(float* accumulated, void* staging, int first, const SubGroup* group, uint64_t* progress)
{
    return with_types(*group, [&](auto, auto* type) {
        return accumulate(*group, accumulated, static_cast<decltype(type)>(staging), first, progress);
    });
}

// Takes one AdamW step and leaves the new weights in the staging buffer. The gradient is accumulated + staging; accumulated may be
// null, and staging is left out unless add_staging. Returns the sum of squares of the gradient before scaling.
double superoffload_step(const AdamWScalars* c, const States* states, float* accumulated, void* staging, int add_staging,
                         const SubGroup* group, uint64_t* progress)
{
    return with_types(*group, [&](auto format, auto* type) {
        return step<decltype(format)>(*group, *c, *states, accumulated, static_cast<decltype(type)>(staging), add_staging, progress);
    });
}

// The same from old_states to new_states and new_weights, with the same results bit for bit.
double superoffload_speculate(const AdamWScalars* c, const States* old_states, const States* new_states, float* accumulated,
                              void* staging, void* new_weights, int add_staging, const SubGroup* group, uint64_t* progress)
{
    return with_types(*group, [&](auto format, auto* type) {
        return speculate<decltype(format)>(*group, *c, *old_states, *new_states, accumulated, static_cast<decltype(type)>(staging),
                                           static_cast<decltype(type)>(new_weights), add_staging, progress);
    });
}

// Leaves the weights of these states in the staging buffer.
double superoffload_restore(const States* states, void* staging, const SubGroup* group, uint64_t* progress)
{
    return with_types(*group, [&](auto, auto* type) { return restore(*group, states->p, static_cast<decltype(type)>(staging), progress); });
}

// Writes the moments of these states to two fp32 arrays, in the calling thread.
void superoffload_decode(const States* states, float* m, float* v, const SubGroup* group)
{
    with_types(*group, [&](auto format, auto*) {
        using Format = decltype(format);
        const auto all = moments<Format>(*states);
        for (const Span& chunk : chunks(*group)) Format::decode(chunk, all.at(chunk), m + chunk.begin, v + chunk.begin);
    });
}

// Sets the moments of these states, rounded to nearest, in the calling thread. What decode returned is set without rounding.
void superoffload_encode(const States* states, const float* m, const float* v, const SubGroup* group)
{
    with_types(*group, [&](auto format, auto*) {
        using Format = decltype(format);
        const auto all = moments<Format>(*states);
        for (const Span& chunk : chunks(*group)) Format::encode(chunk, m + chunk.begin, v + chunk.begin, all.at(chunk));
    });
}
}
