// Runs every function of the kernel on sub-groups of awkward sizes, in arrays that are exactly as large as they need to be and begin at odd
// elements. Compiled with sanitizers, which end it at the first access outside an array and the first undefined operation.

#include "adam.cpp"

#include <memory>

namespace {

// An array on the heap with one element before it, so that it is aligned to its elements only.
template <typename T>
struct Array {
    std::unique_ptr<T[]> memory;
    explicit Array(int64_t n) : memory(new T[n + 1]()) {}
    T* data() { return memory.get() + 1; }
};

struct Arrays {
    Array<float> p, m, v;  // moments of the other formats take less
    Array<uint16_t> m2, v2;
    Array<uint8_t> m1, v1, m_exponents, v_exponents;

    Arrays(int64_t n, int64_t blocks) : p(n), m(n), v(n), m2(n), v2(n), m1(n), v1(n), m_exponents(blocks), v_exponents(blocks) {}

    States states(int format)
    {
        if (format == 0) return {p.data(), m.data(), v.data(), nullptr, nullptr};
        if (format == 1) return {p.data(), m2.data(), v2.data(), nullptr, nullptr};
        return {p.data(), m1.data(), v1.data(), m_exponents.data(), v_exponents.data()};
    }
};

template <typename T>
void run(const std::vector<Segment>& segments, int format)
{
    int64_t n = 0, blocks = 0;
    for (const Segment& each : segments) {
        n += each.count;
        if (each.count) blocks += (each.place + each.count - 1) / BLOCK - each.place / BLOCK + 1;
    }
    const SubGroup group{segments.data(), static_cast<int64_t>(segments.size()), sizeof(T) == 2, format};
    Arrays current(n, blocks), other(n, blocks);
    Array<float> accumulated(n), m(n), v(n);
    Array<T> staging(n), new_weights(n);
    const States states = current.states(format), others = other.states(format), none{};
    const AdamWScalars c{0.5f, 0.99f, 0.9f, 0.1f, 0.999f, 0.001f, 1e-3f, 0.03f, 1e-8f, 12345};
    uint64_t progress = 0;
    superoffload_initialize(&states, &none, nullptr, staging.data(), nullptr, &group, &progress);
    superoffload_initialize(&states, &others, accumulated.data(), staging.data(), new_weights.data(), &group, &progress);
    for (int64_t i = 0; i < n; i++) staging.data()[i] = static_cast<T>(0x3F80 + i % 97);
    for (const int first : {1, 0}) superoffload_accumulate(accumulated.data(), staging.data(), first, &group, &progress);
    for (float* const sum : {static_cast<float*>(nullptr), accumulated.data()})
        for (const int add_staging : {1, 0}) {
            if (!sum && !add_staging) continue;
            superoffload_speculate(&c, &states, &others, sum, staging.data(), new_weights.data(), add_staging, &group, &progress);
            for (T* const weights : {staging.data(), new_weights.data()})
                superoffload_step(&c, &states, sum, staging.data(), weights, add_staging, &group, &progress);
        }
    superoffload_decode(&states, m.data(), v.data(), &group);
    superoffload_encode(&others, m.data(), v.data(), &group);
    superoffload_restore(&others, staging.data(), &group, &progress);
    superoffload_copy(&states, &others, &group, &progress);
}

}  // namespace

int main()
{
    std::vector<std::vector<Segment>> groups;
    for (const int64_t count : {0, 1, 2, 127, 128, 129, 255, 1023, 1025, 65535, 65537, 70000})
        for (const int64_t place : {0, 1, 64, 127, 128, 65500, 65536}) groups.push_back({{count, place, 7}});
    groups.push_back({});
    groups.push_back({{0, 0, 1}, {1, 127, 2}, {2, 127, 3}, {0, 5, 4}, {129, 255, 5}, {66000, 3, 6}, {1, 0, 7}});
    groups.push_back({{1000, (1LL << 32) - 500, 0xFFFFFFFF}});  // places of more than 32 bits
    for (const auto& group : groups)
        for (const int format : {0, 1, 2}) {
            run<uint16_t>(group, format);
            run<float>(group, format);
        }
    return 0;
}
