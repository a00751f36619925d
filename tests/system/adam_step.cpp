// Reads n, the format of the moments, the scalars and four fp32 arrays (weights, first and second moment, gradient) from stdin, takes one
// AdamW step with the kernel, in place and out of place, and writes weights and moments to stdout. Fails if the two differ. Compiled for
// another CPU and run under an emulator.

#include "adam.cpp"

#include <cstdio>

namespace {

// A set of states in memory of its own.
struct Arrays {
    std::vector<float> p;
    std::vector<uint8_t> m, v, m_exponents, v_exponents;

    explicit Arrays(int64_t n) : p(n), m(4 * n), v(4 * n), m_exponents(n), v_exponents(n) {}
    States states() { return {p.data(), m.data(), v.data(), m_exponents.data(), v_exponents.data()}; }
};

}  // namespace

int main()
{
    int64_t head[2];  // elements and format
    AdamWScalars scalars;
    if (std::fread(head, sizeof(head), 1, stdin) != 1 || std::fread(&scalars, sizeof(scalars), 1, stdin) != 1) return 1;
    const int64_t n = head[0];
    std::vector<float> arrays[4];
    for (auto& array : arrays) {
        array.resize(n);
        if (std::fread(array.data(), sizeof(float), n, stdin) != static_cast<size_t>(n)) return 1;
    }
    auto &[weights, first, second, gradient] = arrays;
    const Segment segments[] = {{1000, 77, 1}, {n - 1000, 0, 2}};
    const SubGroup group{segments, 2, 0, static_cast<int32_t>(head[1])};
    Arrays current(n), other(n);
    current.p = weights;
    const States states = current.states(), others = other.states();
    superoffload_encode(&states, first.data(), second.data(), &group);
    uint64_t progress = 0;
    std::vector<float> new_weights(n);
    superoffload_speculate(&scalars, &states, &others, nullptr, gradient.data(), new_weights.data(), 1, &group, &progress);
    superoffload_step(&scalars, &states, nullptr, gradient.data(), gradient.data(), 1, &group, &progress);
    if (current.p != other.p || current.m != other.m || current.v != other.v || gradient != new_weights) return 2;
    if (current.m_exponents != other.m_exponents || current.v_exponents != other.v_exponents) return 2;
    superoffload_decode(&states, first.data(), second.data(), &group);
    for (const auto* array : {&current.p, &first, &second}) std::fwrite(array->data(), sizeof(float), n, stdout);
    return 0;
}
