// Reads n and four fp32 arrays (weights, first and second moment, gradient) from stdin, takes one AdamW step with the kernel, in place and
// out of place, and writes weights and moments to stdout. Fails if the two differ. Compiled for another CPU and run under an emulator.

#include "adam.cpp"

#include <cstdio>

int main()
{
    int64_t n = 0;
    AdamWScalars scalars;
    if (std::fread(&n, sizeof(n), 1, stdin) != 1 || std::fread(&scalars, sizeof(scalars), 1, stdin) != 1) return 1;
    std::vector<float> arrays[4];
    for (auto& array : arrays) {
        array.resize(n);
        if (std::fread(array.data(), sizeof(float), n, stdin) != static_cast<size_t>(n)) return 1;
    }
    uint64_t progress = 0;
    std::vector<float> speculative[4];
    for (auto& array : speculative) array.resize(n);
    const States states{arrays[0].data(), arrays[1].data(), arrays[2].data()};
    const States others{speculative[0].data(), speculative[1].data(), speculative[2].data()};
    superoffload_speculate(&scalars, &states, &others, nullptr, arrays[3].data(), speculative[3].data(), 1, 0, n, &progress);
    superoffload_step(&scalars, &states, nullptr, arrays[3].data(), 1, 0, n, &progress);
    for (int i = 0; i < 4; i++)
        if (std::memcmp(arrays[i].data(), speculative[i].data(), n * sizeof(float)) != 0) return 2;
    for (int i = 0; i < 3; i++) std::fwrite(arrays[i].data(), sizeof(float), n, stdout);
    return 0;
}
