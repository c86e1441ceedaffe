// What plugins/EncoderLayer/device.cuh has, on the host. Included in its place, after common/blocks.cuh. Products of a warpgroup happen at
// once or when they are waited for, by turns.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

namespace onnxfuse::encoder
{
inline long long clock_now()
{
    return 0;
}
inline float reciprocal_approximate(float x)
{
    return 1.0f / x;
}

// --- per thread --------------------------------------------------------------------------------------------------------

struct Operand
{
    unsigned char const* p;
    int step, rows;

    Operand(void const* at, int step_bytes, int rows_bytes)
        : p(static_cast<unsigned char const*>(at))
        , step(step_bytes)
        , rows(rows_bytes)
    {
    }
    void advance(int bytes)
    {
        p += bytes;
    }
};
struct Waiting
{
    float (*c)[4];
    Operand a, b;
    int tiles;
    float (*value)(uint16_t);
};
struct ThreadState
{
    std::vector<Waiting> open_products;
    std::deque<std::vector<Waiting>> products;
};
inline ThreadState& mine()
{
    static std::unordered_map<uint64_t, ThreadState> states;
    return states[uint64_t{blockIdx.x} << 16 | threadIdx.x];
}
inline void do_product(Waiting const& w)
{
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4, g = emulator::lane() / 4, q = emulator::lane() % 4;
    float a[2][16];
    for (int h = 0; h < 2; ++h)
    {
        for (int k = 0; k < 16; ++k)
        {
            int const row = warp * 16 + g + 8 * h;
            a[h][k] = w.value(*reinterpret_cast<uint16_t const*>(w.a.p + k / 8 * w.a.step + row / 8 * w.a.rows + row % 8 * 16 + k % 8 * 2));
        }
    }
    for (int j = 0; j < w.tiles; ++j)
    {
        for (int e = 0; e < 2; ++e)
        {
            int const n = 8 * j + 2 * q + e;
            for (int k = 0; k < 16; ++k)
            {
                float const b
                    = w.value(*reinterpret_cast<uint16_t const*>(w.b.p + k / 8 * w.b.step + n / 8 * w.b.rows + n % 8 * 16 + k % 8 * 2));
                w.c[j][e] += a[0][k] * b;
                w.c[j][2 + e] += a[1][k] * b;
            }
        }
    }
}
inline void product_fence() {}
inline void product_commit()
{
    auto& m = mine();
    m.products.push_back(std::move(m.open_products));
    m.open_products.clear();
}
template <int kLeft>
void product_wait()
{
    auto& products = mine().products;
    while (static_cast<int>(products.size()) > kLeft)
    {
        for (Waiting const& w : products.front())
            do_product(w);
        products.pop_front();
    }
}
template <typename T, int kTiles>
struct Product
{
    static void add(float (*c)[4], Operand const& a, Operand const& b)
    {
        Waiting const w{c, a, b, kTiles, value_of<T>};
        static unsigned turn = 0;
        if (mine().products.empty() && mine().open_products.empty() && ++turn % 5 == 0)
            do_product(w);
        else
            mine().open_products.push_back(w);
    }
};

inline uint32_t transpose(uint32_t word)
{
    emulator::Gift const* const all = emulator::gather({{word}});
    int const g = emulator::lane() / 4, q = emulator::lane() % 4;
    uint32_t to = 0;
    for (int e = 0; e < 2; ++e)
    {
        // Element [g][2q + e] of the transpose is [2q + e][g].
        uint32_t const from = all[(2 * q + e) * 4 + g / 2].words[0];
        to |= (from >> 16 * (g % 2) & 0xffff) << 16 * e;
    }
    emulator::wait_for_warp();
    return to;
}

template <typename V>
V load_fresh(V const* p)
{
    return *p;
}
} // namespace onnxfuse::encoder
