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

// Weights of a sub-group, or the gradient in their place: bf16 or fp32. They are converted a tile at a time, so that a step is compiled
// once for both types.
struct Weights {
    void* data;
    bool are_bf16;

    void load(float* values, int64_t begin, int64_t count) const
    {
        if (are_bf16)
            for (int64_t i = 0; i < count; i++) values[i] = float_of(static_cast<uint32_t>(bf16(begin)[i]) << 16);
        else
            std::memcpy(values, fp32(begin), count * sizeof(float));
    }

    void store(const float* values, int64_t begin, int64_t count) const
    {
        if (are_bf16)
            for (int64_t i = 0; i < count; i++) bf16(begin)[i] = rounded(values[i]);
        else
            std::memcpy(fp32(begin), values, count * sizeof(float));
    }

    int64_t element_bytes() const { return are_bf16 ? 2 : 4; }

private:
    uint16_t* bf16(int64_t begin) const { return static_cast<uint16_t*>(data) + begin; }
    float* fp32(int64_t begin) const { return static_cast<float*>(data) + begin; }

    static uint16_t rounded(float value)
    {
        const uint32_t bits = bits_of(value);
        const uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // ties to even
        return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : nearest);
    }
};

inline double sum_of_squares(const float* values, int64_t count)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += static_cast<double>(values[i]) * values[i];
    return sum;
}

// Copies values from the L1 cache to memory. On x86 whole lines bypass the caches, and finish_streaming must follow; Arm cores themselves
// detect that whole lines are overwritten.
inline void stream(void* to, const void* from, int64_t bytes)
{
    auto* target = static_cast<uint8_t*>(to);
    const auto* source = static_cast<const uint8_t*>(from);
    int64_t done = 0;
#if defined(__x86_64__)
#if defined(__AVX512F__)
    constexpr int64_t LINE = 64;
#else
    constexpr int64_t LINE = 16;
#endif
    const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(target) % LINE);
    done = head < bytes ? head : bytes;
    std::memcpy(target, source, done);
    for (; done + LINE <= bytes; done += LINE)
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
#else
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + done), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done)));
#endif
#endif
    std::memcpy(target + done, source + done, bytes - done);
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
template <typename Moment>
struct alignas(64) NewTile {
    float p[TILE];
    Moment m[TILE];
    Moment v[TILE];
    float weights[TILE];  // or half as many bytes, in bf16
};

// Loads a tile's gradient: accumulated + staging, or one of them.
inline void load_gradient(float* gradient, const Span& tile, const float* accumulated, const Weights& staging, bool add_staging)
{
    if (accumulated && !add_staging) {
        std::memcpy(gradient, accumulated + tile.begin, tile.count * sizeof(float));
        return;
    }
    staging.load(gradient, tile.begin, tile.count);
    if (accumulated)
        for (int64_t i = 0; i < tile.count; i++) gradient[i] += accumulated[tile.begin + i];
}

template <typename Format>
double step(const SubGroup& group, const AdamWScalars c, const States states, const float* accumulated, const Weights staging,
            const Weights new_weights, bool add_staging, uint64_t* progress)
{
    const auto all = moments<Format>(states);
    return sum_over(group, progress, [=](const Span& tile) {
        float gradient[TILE];
        float* const p = states.p + tile.begin;
        load_gradient(gradient, tile, accumulated, staging, add_staging);
        const double sum = sum_of_squares(gradient, tile.count);
        Format::step(c, tile, gradient, p, all.at(tile), p, all.at(tile));
        new_weights.store(p, tile.begin, tile.count);
        return sum;
    });
}

template <typename Format>
double speculate(const SubGroup& group, const AdamWScalars c, const States old_states, const States new_states, const float* accumulated,
                 const Weights staging, const Weights new_weights, bool add_staging, uint64_t* progress)
{
    const auto from = moments<Format>(old_states), to = moments<Format>(new_states);
    return sum_over(group, progress, [=](const Span& tile) {
        float gradient[TILE];
        NewTile<typename Format::Type> made;
        load_gradient(gradient, tile, accumulated, staging, add_staging);
        const double sum = sum_of_squares(gradient, tile.count);
        const auto target = to.at(tile);
        Format::step(c, tile, gradient, old_states.p + tile.begin, from.at(tile), made.p,
                     {made.m, made.v, target.m_exponents, target.v_exponents});
        const Weights made_weights{made.weights, new_weights.are_bf16};
        made_weights.store(made.p, 0, tile.count);
        stream(new_states.p + tile.begin, made.p, tile.count * sizeof(float));
        stream(target.m, made.m, tile.count * sizeof(*made.m));
        stream(target.v, made.v, tile.count * sizeof(*made.v));
        const int64_t bytes = new_weights.element_bytes();
        stream(static_cast<uint8_t*>(new_weights.data) + bytes * tile.begin, made.weights, bytes * tile.count);
        return sum;
    });
}

// Returns the exponents of a tile's first or second moments, where they are 8-bit.
inline int64_t blocks(const Span& tile) { return (tile.place + tile.count - 1) / BLOCK - tile.place / BLOCK + 1; }

template <typename Format>
double copy(const SubGroup& group, const States from_states, const States to_states, uint64_t* progress)
{
    const auto from = moments<Format>(from_states), to = moments<Format>(to_states);
    return sum_over(group, progress, [=](const Span& tile) {
        const auto source = from.at(tile), target = to.at(tile);
        stream(to_states.p + tile.begin, from_states.p + tile.begin, tile.count * sizeof(float));
        stream(target.m, source.m, tile.count * sizeof(*source.m));
        stream(target.v, source.v, tile.count * sizeof(*source.v));
        if (from_states.m_exponents) {
            std::memcpy(target.m_exponents, source.m_exponents, blocks(tile));
            std::memcpy(target.v_exponents, source.v_exponents, blocks(tile));
        }
        return 0.0;
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
    std::memset(target.m_exponents, 0, blocks(tile));
    std::memset(target.v_exponents, 0, blocks(tile));
}

// Calls function(format) with the format of a sub-group's moments.
template <typename Function>
auto with_format(const SubGroup& group, const Function& function)
{
    return group.format == 0 ? function(Fp32()) : group.format == 1 ? function(Bf16()) : function(Int8());
}

Weights weights_of(const SubGroup& group, void* data) { return {data, group.has_bf16_weights != 0}; }

}  // namespace

extern "C" {

// Copies the weights at `from` to the master weights and zeroes the other arrays; those of second, the other buffer and accumulated may be
// null. Its threads are the first to touch the pages.
double superoffload_initialize(const States* states, const States* second, float* accumulated, void* from, void* other_buffer,
                               const SubGroup* group, uint64_t* progress)
{
    const Weights weights = weights_of(*group, from);
    return sum_over(*group, progress, [=](const Span& tile) {
        weights.load(states->p + tile.begin, tile.begin, tile.count);
        for (float* array : {second->p, accumulated})
            if (array) std::memset(array + tile.begin, 0, tile.count * sizeof(float));
        for (const States* each : {states, second})
            with_format(*group, [&](auto format) { zero<decltype(format)>(*each, tile); });
        const int64_t bytes = weights.element_bytes();
        if (other_buffer) std::memset(static_cast<uint8_t*>(other_buffer) + bytes * tile.begin, 0, bytes * tile.count);
        return 0.0;
    });
}

// Adds the staging buffer to accumulated, or overwrites accumulated with it if first. Returns the sum of squares of accumulated.
double superoffload_accumulate(float* accumulated, void* staging, int first, const SubGroup* group, uint64_t* progress)
{
    const Weights gradients = weights_of(*group, staging);
    return sum_over(*group, progress, [=](const Span& tile) {
        float sum[TILE];
        load_gradient(sum, tile, first ? nullptr : accumulated, gradients, true);
        std::memcpy(accumulated + tile.begin, sum, tile.count * sizeof(float));
        return sum_of_squares(sum, tile.count);
    });
}

// Takes one AdamW step and leaves the new weights in a buffer that may be the staging buffer itself. The gradient is accumulated + staging;
// accumulated may be null, and staging is left out unless add_staging. Returns the sum of squares of the gradient before scaling.
double superoffload_step(const AdamWScalars* c, const States* states, float* accumulated, void* staging, void* new_weights, int add_staging,
                         const SubGroup* group, uint64_t* progress)
{
    return with_format(*group, [&](auto format) {
        return step<decltype(format)>(*group, *c, *states, accumulated, weights_of(*group, staging), weights_of(*group, new_weights),
                                      add_staging, progress);
    });
}

// The same from old_states to new_states and new_weights, with the same results bit for bit.
double superoffload_speculate(const AdamWScalars* c, const States* old_states, const States* new_states, float* accumulated,
                              void* staging, void* new_weights, int add_staging, const SubGroup* group, uint64_t* progress)
{
    return with_format(*group, [&](auto format) {
        return speculate<decltype(format)>(*group, *c, *old_states, *new_states, accumulated, weights_of(*group, staging),
                                           weights_of(*group, new_weights), add_staging, progress);
    });
}

// Leaves the weights of these states in a buffer.
double superoffload_restore(const States* states, void* buffer, const SubGroup* group, uint64_t* progress)
{
    const Weights weights = weights_of(*group, buffer);
    return sum_over(*group, progress, [=](const Span& tile) {
        weights.store(states->p + tile.begin, tile.begin, tile.count);
        return 0.0;
    });
}

// Copies one set of states to another.
double superoffload_copy(const States* from, const States* to, const SubGroup* group, uint64_t* progress)
{
    return with_format(*group, [&](auto format) { return copy<decltype(format)>(*group, *from, *to, progress); });
}

// Writes the moments of these states to two fp32 arrays, in the calling thread.
void superoffload_decode(const States* states, float* m, float* v, const SubGroup* group)
{
    with_format(*group, [&](auto format) {
        using Format = decltype(format);
        const auto all = moments<Format>(*states);
        for (const Span& chunk : chunks(*group)) Format::decode(chunk, all.at(chunk), m + chunk.begin, v + chunk.begin);
    });
}

// Sets the moments of these states, rounded to nearest, in the calling thread. What decode returned is set without rounding.
void superoffload_encode(const States* states, const float* m, const float* v, const SubGroup* group)
{
    with_format(*group, [&](auto format) {
        using Format = decltype(format);
        const auto all = moments<Format>(*states);
        for (const Span& chunk : chunks(*group)) Format::encode(chunk, m + chunk.begin, v + chunk.begin, all.at(chunk));
    });
}
}
